// SPDX-License-Identifier: Apache-2.0
//
// lineage.h: versions, the operations that produce them, and the table that counts their bytes.
//
// Nothing here knows a tensor. level_tensor.h adds the storages, call.h the recorded calls; the
// arithmetic below also serves a recorded trace.
//
// Note [Lineage owns inputs, never outputs]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Strong references run from a version to its producer and from an operation to the versions it
// read. What points forward (`readers`, `outputs`) is a plain pointer that the pointee clears when
// it dies. So lineage dies by itself with the last version that needs it, and following owners never
// comes back. A chain of 10^5 operations dies too: bury() works through a list, since destructors
// that call destructors would need a stack frame for each link.
//
// Invariants, asserted by Table::check():
//   L1  A version is resident or evicted; an evicted version has a producer.
//   L2  A candidate is resident, has a producer and bytes, and belongs to the table that lists it.
//   L3  Every input of a producer was in the program before it: input.producer.order < order.
//   L4  pins > 0 implies resident.
//   L5  A table's bytes are the sum over its own resident versions and its inner tables' bytes.
//   L6  readers and inputs mirror each other, as do outputs and producers.
//   L7  A table's unconstrained bytes are the sum over its own held versions and its inner tables'.
//
// Note [What a call would have held]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A fraction is one of the peak that the call has without a budget, and most calls have one. So beside
// the bytes that are resident a table counts those that would be, were nothing ever evicted: of each
// version from when it is made until the program drops it, writes over it or takes it away, evicted
// or not. A snapshot counts until its lineage goes. What replays make for a while does not count. With
// what the running operator allocates, and the bytes beside operators, the highest such sum is the
// peak of the same call without a budget, to the byte; a test compares the two. What a policy keeps
// although the program has dropped it is not in it.

#pragma once

#include <algorithm>
#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <c10/util/SmallVector.h>

#include "engine/shared_budget.h"
#include "engine/unrecorded.h"
#include "policy/eviction.h"
#include "policy/keeping.h"

namespace rematfn {

class Domain;
class Table;
struct Trace;
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
void bury(Node* node);

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
  Ref(Ref<U>&& other) noexcept : node_(other.give_up()) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(node_, other.node_);
    return *this;
  }
  ~Ref() { reset(); }
  void reset() {
    if (T* node = std::exchange(node_, nullptr); node != nullptr && --node->references == 0) {
      bury(node);
    }
  }
  T* give_up() { return std::exchange(node_, nullptr); }
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
  // Its table lists it among those that may go, in time.
  [[nodiscard]] bool is_candidate() const { return slot != kNoSlot; }
  // And it may now, but for who holds its storage.
  [[nodiscard]] bool may_go() const { return is_candidate() && pins == 0; }
  // Made again for one replay alone, which may write over it.
  [[nodiscard]] bool may_be_overwritten() const {
    return is_candidate() && !program && pending <= 1;
  }

  Ref<Table> table;         // whose bytes these are; none for what came from outside
  Version* previous = nullptr;  // the table's list of its versions, oldest first
  Version* next = nullptr;
  Ref<Operation> producer;  // none: a constant, never evicted
  Input* readers = nullptr;

  std::size_t nbytes = 0;
  double last_access = 0;      // program time
  double next_use = kUnknown;  // program time; known to a guide
  std::uint32_t value = kNoValue;  // its name in the domain's trace
  float weight = 1;                // of the guide's plan
  std::size_t slot = kNoSlot;  // place among the table's candidates
  std::size_t turn = kNoSlot;  // place in the table's batch
  // Numbers of autograd nodes; 0: none. See Note [What autograd may have saved]
  std::uint32_t first_saver = 0;
  std::uint32_t last_saver = 0;
  std::uint32_t pins = 0;
  std::uint32_t pending = 0;  // planned replays, and the waiting operator, that will read it
  bool resident = true;
  // The domain's `next_order` when its address was given out.
  // See Note [An address is good until its level's next operator]
  std::uint64_t exposed = 0;
  bool trimmed = false;   // a constant because the record was too long
  bool held = false;  // its bytes count in what the call would have held
  bool raw = false;       // uninitialised memory, perhaps being filled where we cannot see: kept
  bool program = false;   // some tensor of the program stands on these very contents
  bool consumed = false;  // an operator of the program has read it
  bool kept = false;      // goes when nothing else can
  bool backward = false;  // made in a backward; known where something may be kept
};

// One recorded call of an operator.
struct Operation : Node {
  ~Operation() override;

  // Room for all inputs is to be made first, since other inputs refer to them.
  void add_input(Ref<Version> version);
  // Makes `version` an output; its bytes can now be had again by replaying.
  void add_output(Version& version);
  [[nodiscard]] virtual std::string_view name() const = 0;  // the operator's
  // Runs it again. Its inputs are resident; wanted outputs are passed to domain.arrive().
  virtual void replay(Domain& domain) = 0;
  // Bytes a replay allocates, copies of inputs it would overwrite included.
  [[nodiscard]] virtual std::size_t replay_bytes() const = 0;
  // Whether it writes to its i-th input.
  [[nodiscard]] virtual bool writes(std::size_t i) const = 0;

  Ref<Table> table;     // the level that ran it
  std::uint64_t order;  // place in the program
  double cost = 0;      // seconds of the cost model
  double flops = 0;     // of matrix products, convolutions and attention
  std::size_t output_bytes = 0;   // what running it allocates
  std::size_t scratch_bytes = 0;  // and, beyond that, needs for the while
  c10::SmallVector<Input, 3> inputs;
  c10::SmallVector<Version*, 2> outputs;  // by position; null once dead
  bool planned = false;           // waits in the replay heap
  std::uint64_t last_walk = 0;    // that has visited it
  std::uint32_t component = 0;    // evicted component of h_eq; 0: not evicted
};

// What a call of a transformed function did. Read by `stats`.
struct Statistics {
  std::size_t peak_bytes = 0;
  std::size_t unconstrained_bytes = 0;  // See Note [What a call would have held]
  std::size_t min_budget = 0;
  std::uint64_t operators = 0;
  std::uint64_t evictions = 0;
  std::uint64_t replays = 0;
  double base_cost = 0;
  double replayed_cost = 0;
  double base_flops = 0;
  double replayed_flops = 0;
};

// A number of bytes that changes under the domain's lock, and is read by anybody.
class ByteCount {
 public:
  operator std::size_t() const { return nbytes_.load(std::memory_order_relaxed); }
  void operator+=(std::size_t n) { nbytes_.store(*this + n, std::memory_order_relaxed); }
  void operator-=(std::size_t n) { nbytes_.store(*this - n, std::memory_order_relaxed); }
  void operator=(std::size_t n) { nbytes_.store(n, std::memory_order_relaxed); }

 private:
  std::atomic<std::size_t> nbytes_{0};
};

// Note [Nothing of a call outlives it but numbers]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Whoever asks what a call did may ask long after it, and after its backward, whose figures are the
// call's too. A level that was kept for that would keep the forms of its operators, with whatever was
// among their arguments. So a level writes its figures where they can be read without it.
struct Report {
  Statistics statistics;
  ByteCount budget;
  ByteCount resident_bytes;
  std::atomic<std::uint64_t> passed_over{0};  // operators that left no record
  bool guide_lost = false;
  c10::intrusive_ptr<UnrecordedBytes> unrecorded;
  std::shared_ptr<Trace> trace;  // if the level records
  std::weak_ptr<Domain> domain;

  // Those that were passed over included.
  [[nodiscard]] Statistics counted() const;
  // Resident, or beside operators. See Note [Bytes beside operators].
  [[nodiscard]] std::size_t bytes_now() const {
    return resident_bytes + (unrecorded ? unrecorded->live() : 0);
  }
};

// What a score written by the user is shown of a candidate.
struct Considered {
  double nbytes;
  double cost;
  double ancestors;  // cost of those that are evicted
  double age;
  double next_use;  // time until then, kNever or kUnknown
  bool consumed;
  std::string_view producer;
};
// May throw.
using Judge = std::function<double(const Considered&)>;

// Candidates among whom the next victims are: first those that were picked, the lowest first, then
// those that were offered since. Null where one has gone.
// See Note [Victims are chosen a batch at a time]
struct Batch {
  std::vector<Version*> versions;
  std::size_t picked = 0;  // how many of them
  std::size_t first_picked = 0;  // all before are null
  std::size_t first_offered = 0;
  std::size_t evictions_left = 0;  // after so many it is picked anew
  double limit = kNever;  // the lowest score that was not picked

  void add(Version& version);
  void remove(Version& version);
  void clear();
};

// Thrown when room cannot be made: what `table` would have to allow for, and what stands in the way.
struct NoRoom {
  Table* table = nullptr;
  std::size_t smallest_budget = 0;
  std::size_t unevictable = 0;  // resident bytes left when nothing more could go
  bool thrashing = false;   // replays evict each other's inputs without end; the bytes are a guess
};

inline constexpr std::size_t kNoBudget = std::numeric_limits<std::size_t>::max();

// A level's versions: which may go, and how many bytes they hold together.
class Table : public Node {
 public:
  Table(std::shared_ptr<Domain> domain, Table* enclosing, std::size_t budget, Score score);
  ~Table() override;

  const std::shared_ptr<Domain> domain;
  const std::shared_ptr<Report> report;
  const Ref<Table> enclosing;
  std::vector<Table*> inner;
  std::size_t budget;
  Score score;
  Keeping keeping;
  Judge judge;  // if set, scores instead of `score`
  const std::uint32_t depth;
  // Of the unconstrained peak so far, if more than `budget` was: see note_peak(). None: zero.
  double fraction = 0;
  // The budget is of a peak that was only estimated: it gives way to what an operator needs.
  bool is_estimate = false;
  bool is_estimate_unguided = false;  // the same from when the guide is lost
  ByteCount& resident_bytes;  // inner tables' included
  std::size_t held_bytes = 0;   // the same; see Note [What a call would have held]
  // As last taken notice of; inner tables' included. See Note [Bytes beside operators].
  ByteCount unrecorded_bytes;
  std::size_t loose_bytes = 0;     // of candidates that are not pinned
  std::size_t trimmed_bytes = 0;   // of what was trimmed and is resident; inner tables' included
  // See Note [A shared budget is a sum]. None if `budget` is this table's alone, or if a table around
  // it shares the same.
  std::shared_ptr<SharedBudget> shared;
  std::size_t in_flight = 0;  // claimed, and not resident yet
  double clock_before = 0;    // when room was last made: the domain's clock,
  double time_before = 0;     // and the members'
  Statistics& statistics;
  Version* oldest = nullptr;
  Version* newest = nullptr;

  std::vector<Candidate> candidates;
  std::vector<Version*> candidate_versions;  // in step with `candidates`
  Batch batch;

  // The version's bytes count here from now on. It must not belong to a table yet.
  void admit(Version& version);
  void expel(Version& version);
  // The program, or lineage, asks no more for what `version` contains, a version of this table.
  void let_go(Version& version);

  // The bytes of a version of this table come or go.
  void charge(std::size_t nbytes);
  void discharge(std::size_t nbytes);
  // The same for a version of this table that has been trimmed.
  void charge_trimmed(std::size_t nbytes);
  void discharge_trimmed(std::size_t nbytes);
  // Nothing of it is resident any more.
  virtual void emptied() {}
  // sharer.cpp
  void join(std::shared_ptr<SharedBudget> budget_of_many);
  void leave_shared();
  // Bytes of this table, or of one inside, are about to change hands. See Note [A shared budget is a sum]
  void hold(std::size_t nbytes);
  // That `nbytes` more may be allocated, if they fit. Replaces the claim before.
  [[nodiscard]] bool claim(std::size_t nbytes);
  // What counts against the budget.
  [[nodiscard]] std::size_t used_bytes() const { return resident_bytes + unrecorded_bytes; }
  // What could go, inner tables' included; but for what somebody turns out to hold.
  [[nodiscard]] std::size_t evictable_bytes() const;
  // `in_flight` bytes beyond the resident ones are in use, here and in the enclosing tables. A budget
  // that is a fraction rises with the peak that there would have been.
  void note_peak(std::size_t in_flight);
  // An operator needs `nbytes` of budget, and allocates `in_flight` of them. False if the budget
  // stays below. See Note [A fraction of what is not known yet]
  bool give_way(std::size_t nbytes, std::size_t in_flight);
  void note_need(std::size_t nbytes);

  // The program marks `version`. The innermost table around that heeds marks decides what it means.
  void mark(Version& version, std::string_view name);

  void enlist(Version& version);
  void delist(Version& version);
  // A candidate that may go: it is considered along with the batch, if there is one.
  void offer(Version& version);
  void check() const;

 private:
  void charge_shared(std::size_t nbytes);
  void raise_budget(double bytes);
};

// The candidate's score may have risen; or fallen, if `lower`. See Note [Stale scores are too low].
void mark_stale(const Version& version, bool lower);
// Does `table` or one around it share `budget`? Then what is inside counts there.
[[nodiscard]] bool is_shared_around(const std::shared_ptr<SharedBudget>& budget,
                                    const Table* table);
// What a candidate's score is multiplied by.
[[nodiscard]] double weight_of(const Version& version);

void pin(Version& version);
void unpin(Version& version);
void expect(Version& version);  // one more pending reader
void unexpect(Version& version);
// Node `number`, if it is one, may save `version`.
inline void note_saver(Version& version, std::uint32_t number) {
  if (number == 0) return;
  if (version.first_saver == 0) version.first_saver = number;
  version.last_saver = std::max(version.last_saver, number);
}
// The program reads or makes `version`.
void touch(Version& version, double now);

}  // namespace rematfn
