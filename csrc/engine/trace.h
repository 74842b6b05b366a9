// SPDX-License-Identifier: Apache-2.0
//
// trace.h: what a program did to memory, without its tensors.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include <c10/util/SmallVector.h>

#include "engine/table.h"

namespace rematfn {

// What a call is, apart from its name and its values.
struct CallFacts {
  double cost = 0;  // seconds
  double pause = 0;  // seconds since the call before it ended, replays and waiting aside; 0: not known
  double modelled = 0;  // what the cost model gives it, in seconds; 0: not known
  double flops = 0;
  std::size_t output_bytes = 0;
  std::size_t scratch_bytes = 0;
  bool replayable = true;
  bool raw = false;  // what it makes is uninitialised: kept until it is written
  bool backward = false;  // autograd called it, in a backward
};

struct Trace {
  using Id = std::uint32_t;  // of a value: the contents of one storage between two writes

  struct Value {
    std::size_t nbytes = 0;
    bool counted = false;  // made inside: its bytes are in the budget
    float packed_share = 1;  // that a copy in memory would take
  };
  struct Read {
    Id value;
    bool written = false;

    bool operator==(const Read& other) const = default;
  };
  struct Made {
    Id value;
    std::int32_t over = -1;  // the read whose storage it takes over; none: a fresh storage

    bool operator==(const Made& other) const = default;
  };
  struct Call : CallFacts {
    Call(std::string_view operator_name, const CallFacts& facts)
        : CallFacts(facts), name(operator_name) {}

    std::string name;
    std::vector<Read> reads;
    std::vector<Made> makes;
  };
  struct Mark {
    Id value;
    std::string name;  // may be empty
  };
  enum class What : std::uint8_t {
    kCall,
    kRelease,  // the program has dropped the last tensor on a value
    kSeal,     // a value left: resident from now on, and not counted
    kStored,   // the same, where there is room: the function has stored it away
    kFilled,   // a value may hold what its call has not made: resident, and a constant from now on
    kAddressed,  // somebody has its address: a constant, which is not moved from now on
    kRead,     // a value is about to be read by its address, by no call: resident at that moment
    kMark,     // the program has marked a value: see keeping.h
    kUnrecorded,  // so many bytes are now alive of what was allocated beside the calls
  };
  [[nodiscard]] static bool leaves(What what) { return what == What::kSeal || what == What::kStored; }
  struct Event {
    What what;
    std::uint32_t index;  // of the call, the mark, the unrecorded bytes, or the value
  };

  std::vector<Value> values;
  std::vector<Call> calls;
  std::vector<Mark> marks;
  std::vector<std::size_t> unrecorded;
  std::vector<Event> events;

  [[nodiscard]] Id add_value(std::size_t nbytes, bool counted);
  void add_call(Call call);
  // What becomes of a value.
  void add(What what, Id value) { events.push_back({what, value}); }
  void add_mark(Id value, std::string name);
  void add_unrecorded(std::size_t nbytes);
  // Whether the other has the same calls, of whatever sizes, and they read and make the same values.
  [[nodiscard]] bool is_same_program(const Trace& other) const;
  // Of all calls, in seconds.
  [[nodiscard]] double cost() const;
  // With what lies between them.
  [[nodiscard]] double elapsed() const;
  // Of what was made inside, and left.
  [[nodiscard]] std::size_t result_bytes() const;
  // Throws std::invalid_argument unless each value is made before it is read, and released once.
  void check() const;
};

// One call as the engine sees it, for a recorder or a guide.
struct ObservedCall : CallFacts {
  ObservedCall(std::string_view operator_name, const CallFacts& facts)
      : CallFacts(facts), name(operator_name) {}

  struct Read {
    Ref<Version> version;
    bool written;
  };
  struct Made {
    Ref<Version> version;
    std::int32_t over;
  };
  std::string_view name;
  c10::SmallVector<Read, 4> reads;
  c10::SmallVector<Made, 2> makes;
};

// Writes down what a domain does.
class Recorder {
 public:
  // Nobody keeps a record of more operators.
  static constexpr std::size_t kMostCalls = std::size_t{1} << 19;

  void note(const ObservedCall& call);
  [[nodiscard]] bool is_too_long() const { return trace->calls.size() > kMostCalls; }
  // What becomes of a version, if an operator has read or made it.
  void note(Trace::What what, const Version& version);
  void note_mark(const Version& version, const std::string& name);
  // What was an estimate is known.
  void note_packed(const Version& version);
  void note_unrecorded(std::size_t nbytes) { trace->add_unrecorded(nbytes); }
  // What it has written down, and then a call that did not come to run, if there is one.
  [[nodiscard]] Trace followed_by(const ObservedCall* refused) const;

  const std::shared_ptr<Trace> trace = std::make_shared<Trace>();

 private:
  // A value that is read without having been made came from outside.
  Trace::Id id_of(Version& version, bool made);

  std::unordered_set<Trace::Id> sealed_;
};

}  // namespace rematfn
