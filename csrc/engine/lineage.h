// SPDX-License-Identifier: Apache-2.0
//
// lineage.h: versions, and the operations that produce them.
//
// Nothing here knows a tensor. level_tensor.h adds the storages, call.h the recorded calls; the
// arithmetic below also serves a recorded trace.
//
// Note [Lineage owns inputs, never outputs]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Strong references run from a version to its producer and from an operation to the versions it
// read. What points forward (`readers`, `outputs`) is a plain pointer that the pointee clears when
// it dies. So lineage dies by itself with the last version that needs it, and following owners never
// comes back. A chain of 10^5 operations dies too: destroy() works through a list, since destructors
// that call destructors would need a stack frame for each link.
//
// Invariants, asserted by Table::check():
//   L1  What is away has a copy or a producer.
//   L2  A candidate is here, has bytes and a way to go, and belongs to the table that lists it.
//   L3  Every input of a producer was in the program before it: input.producer.order < order.
//   L4  pins > 0 implies that it is here.
//   L5  A table's bytes are the sum over its own versions that have bytes and its inner tables' bytes.
//   L6  readers and inputs mirror each other, as do outputs and producers.
//   L7  A table's unconstrained bytes are the sum over its own versions with tensors and its inner tables'.

#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

#include <c10/util/SmallVector.h>

#include "engine/way.h"
#include "policy/eviction.h"

namespace rematfn {

class Ledger;
class Room;
class Table;
struct Operation;
struct Version;

// Intrusive counting without atomics: every reference is taken and dropped under the domain's lock.
class Node {
 public:
  Node() = default;
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;
  virtual ~Node() = default;

  std::uint32_t references = 0;
  Node* next_dead = nullptr;
};

// Destroys a node nobody refers to any more, and what dies with it, without recursion.
void destroy(Node* node);

template <class T>
class Ref {
 public:
  Ref() = default;
  explicit Ref(T* node) : node_(node) {
    if (node_ != nullptr) ++node_->references;
  }
  Ref(const Ref& other) : Ref(other.node_) {}
  template <class U>
    requires std::convertible_to<U*, T*>
  Ref(const Ref<U>& other) : Ref(other.get()) {}
  Ref(Ref&& other) noexcept : node_(std::exchange(other.node_, nullptr)) {}
  // Hands the reference over without counting, so it may run outside the domain's lock.
  template <class U>
    requires std::convertible_to<U*, T*>
  Ref(Ref<U>&& other) noexcept : node_(other.release()) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(node_, other.node_);
    return *this;
  }
  ~Ref() { reset(); }
  void reset() {
    if (T* node = std::exchange(node_, nullptr); node != nullptr && --node->references == 0) {
      destroy(node);
    }
  }
  T* release() { return std::exchange(node_, nullptr); }
  T* get() const { return node_; }
  T* operator->() const { return node_; }
  T& operator*() const { return *node_; }
  explicit operator bool() const { return node_ != nullptr; }

 private:
  T* node_ = nullptr;
};

inline constexpr std::size_t kNoSlot = static_cast<std::size_t>(-1);
inline constexpr std::uint32_t kNoValue = static_cast<std::uint32_t>(-1);

// What an operation reads. The inputs that read one version are linked, beginning with the latest.
struct Input {
  Ref<Version> version;
  Operation* reader = nullptr;
  Input* previous = nullptr;  // null: this is the latest
  Input* next = nullptr;
};

// The contents of one storage after its k-th write: the unit of residency and of eviction.
struct Version : Node {
  ~Version() override;
  [[nodiscard]] Place place() const { return place_; }
  [[nodiscard]] bool is_here() const { return place_ == Place::kHere; }
  // Not here: the way that has, or makes, a copy; else null.
  [[nodiscard]] Way* copied_by() const { return copied_by_; }
  // Its bytes count: they are here, or there is room for them.
  [[nodiscard]] bool has_bytes() const { return place_ != Place::kAway; }
  // And can be read, though they may be leaving.
  [[nodiscard]] bool is_readable() const {
    return is_here() || place_ == Place::kLeaving;
  }
  // See Note [A version goes by a way]
  [[nodiscard]] bool can_be_fetched() const { return place_ == Place::kAway && copied_by_ != nullptr; }
  [[nodiscard]] bool is_packed() const { return packed_bytes > 0; }
  [[nodiscard]] bool must_be_replayed() const { return place_ == Place::kAway && copied_by_ == nullptr; }
  [[nodiscard]] bool is_addressed() const { return addressed || communicated; }
  // Its table lists it among those that may go, in time.
  [[nodiscard]] bool is_candidate() const { return slot != kNoSlot; }
  // And it may now, but for who holds its storage.
  [[nodiscard]] bool may_go() const { return is_candidate() && pins == 0; }
  // Made again for one replay alone, which may write over it.
  [[nodiscard]] bool may_be_overwritten() const {
    return is_candidate() && producer && !has_tensor && pending <= 1;
  }

  Ref<Table> table;         // whose bytes these are; none for what came from outside
  Version* previous = nullptr;  // the table's list of its versions, oldest first
  Version* next = nullptr;
  Ref<Operation> producer;  // none: a constant
  Input* readers = nullptr;
  Way* way = nullptr;        // a candidate: the one that it would go by

  std::size_t nbytes = 0;
  std::size_t packed_bytes = 0;  // of its copy, that count here
  float packed_share = 1;        // that a copy in memory would take; 1: it cannot be packed
  double last_access = 0;      // program time
  double next_use = kUnknown;  // program time; known to a guide
  std::uint32_t value = kNoValue;  // its number in the guide's trace
  std::uint32_t recorded = kNoValue;  // in the recorder's
  std::uint32_t entry = kNoValue;  // in the journal
  std::size_t slot = kNoSlot;  // place among the table's candidates
  std::size_t batch_slot = kNoSlot;  // place in the table's batch
  std::size_t recent_slot = kNoSlot;  // place among what the evictor is to look at soon
  std::uint32_t pins = 0;
  std::uint32_t pending = 0;  // queued replays, and the waiting operator, that will read it
  // The domain's `next_order` when its address was given out.
  // See Note [An address is good until its level's next operator]
  std::uint64_t exposed = 0;
  bool trimmed = false;   // a constant because the record was too long
  bool addressed = false;  // somebody outside may read or fill it by address: it goes by no copy
  bool communicated = false;  // so may a collective, until it is waited for
  bool raw = false;       // uninitialised memory, perhaps being filled where we cannot see: kept
  // Some tensor of the program stands on these very contents: see Note [What a call would have held]
  bool has_tensor = false;
  bool consumed = false;  // an operator of the program has read it
  bool kept = false;      // goes when nothing else can
  bool marked = false;    // kept because the program says so, whatever a plan does
  bool backward = false;  // made in a backward; known where something may be kept

 private:
  friend class Ledger;  // Note [The ledger alone moves a version]

  Place place_ = Place::kHere;
  Way* copied_by_ = nullptr;
};

// One recorded call of an operator.
struct Operation : Node {
  ~Operation() override;

  // Room for all inputs is to be made first, since other inputs refer to them.
  void add_input(Ref<Version> version);
  // Makes `version` an output; its bytes can now be had again by replaying.
  void add_output(Version& version);
  [[nodiscard]] virtual std::string_view name() const = 0;  // the operator's
  // Runs it again. Its inputs are resident; wanted outputs are passed to room.arrive().
  virtual void replay(Room& room) = 0;
  // Bytes a replay allocates, copies of inputs it would overwrite included.
  [[nodiscard]] std::size_t replay_bytes() const;
  // Whether it writes to its i-th input.
  [[nodiscard]] virtual bool writes(std::size_t i) const = 0;
  // Whether its replay may, in place.
  [[nodiscard]] virtual bool may_overwrite(const Version& input) const { return input.may_be_overwritten(); }

  Ref<Table> table;     // the level that ran it
  std::uint64_t order;  // place in the program
  double cost = 0;      // seconds of the cost model
  double flops = 0;     // of matrix products, convolutions and attention
  std::size_t output_bytes = 0;   // what running it allocates
  std::size_t scratch_bytes = 0;  // and, beyond that, needs for the while
  c10::SmallVector<Input, 3> inputs;
  c10::SmallVector<Version*, 2> outputs;  // by position; null once dead
  bool queued = false;              // waits in the replay queue
  std::uint32_t call = kNoValue;    // its number in the trace whose schedule is carried out
  std::uint64_t last_walk = 0;    // that has visited it
};

}  // namespace rematfn
