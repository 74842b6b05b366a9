// SPDX-License-Identifier: Apache-2.0
//
// journal.h: what happened to memory, event by event, and why.
//
// Note [A journal is written on request]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Statistics say how much; a journal says what, when and why. It grows with the program, so a domain
// has one only if somebody asks, and whoever does not pays for the test of a pointer. It decides
// nothing: a call with a journal evicts what the same call without one does. It names values by
// numbers of its own, since it outlives the versions.

#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "engine/lineage.h"

namespace rematfn {

struct ObservedCall;

// Where in the program an operator is called.
struct Site {
  static constexpr std::uint64_t kNoNode = std::numeric_limits<std::uint64_t>::max();

  std::uint32_t place = 0;       // a place in the program's text, by the interpreter's number; 0: none
  std::uint64_t nodes = 0;       // how many autograd nodes its thread has made by then
  std::uint64_t node = kNoNode;  // in a backward: the number of the node that calls it
};

class Journal {
 public:
  using Id = std::uint32_t;  // of a value or a call, each from 0
  static constexpr Id kNone = std::numeric_limits<Id>::max();

  enum class What : std::uint8_t {
    kMade,        // a value's bytes count from now on
    kDropped,     // evicted, to be replayed
    kMoved,       // evicted, its copy is elsewhere
    kReplayed,    // it has its bytes again
    kReturned,    // the same, by its copy; counted from when that is begun
    kTurnedBack,  // it was to return, and is away again
    kForgotten,   // nobody asks for its copy any more
    kReleased,    // nobody asks for its bytes: the program dropped it or wrote over it
    kLeft,        // its bytes are somebody else's from now on
    kReplay,      // a call runs again; `index` is the call's
    kUnrecorded,  // what is allocated beside operators has changed
  };
  struct Event {
    What what;
    Id index;      // of the value, or of the call
    Id during;     // the last call that has begun; none: kNone
    double time;   // seconds since the journal was begun
    std::size_t used;  // bytes that count against the outermost budget, afterwards
    float score = 0;   // of an eviction
  };
  struct Call {
    std::string name;  // the operator's
    Site site;
    double begun = 0;  // seconds since the journal was begun
    double ended = -1;  // -1: it did not run to its end
    double cost = 0;    // seconds, as the level counts them
    std::size_t needed = 0;  // at the least: its inputs and what it allocates
    std::size_t used = 0;    // before what it makes counts
    std::size_t peak = 0;    // what it allocated, at once
    bool backward = false;
    std::vector<Id> reads;
  };
  struct Value {
    std::size_t nbytes;
    Id made_by;  // a call; kNone: a copy of what was to be overwritten, or made by nobody we saw
    bool has_producer = false;  // it can be replayed
    Id cut_at = kNone;     // the number of events by when it could no longer be; kNone: it still can
    bool raw = false;
    bool kept = false;
    bool held = false;     // it was to go, and somebody outside held its storage
    double score = 0;      // of its latest eviction
  };

  explicit Journal(const Table& root) : root_(root) {}

  // The program calls an operator.
  void begin(std::string_view name, const Site& site, bool backward);
  void note_need(std::size_t nbytes) { last().needed = std::max(last().needed, nbytes); }
  // Its kernel has run.
  void note_run(double cost, std::size_t peak);
  void note_reads(const ObservedCall& call);

  void note_made(Version& version);
  void note(What what, const Version& version);
  void note_cut(const Version& version);
  void note_score(const Version& version, double score);
  void note_held(const Version& version);
  void note_replay(const Operation& operation);
  void note_unrecorded() { add(What::kUnrecorded, kNone); }

  // The place that the last call belongs to: of a backward's, that of the call whose gradient it makes.
  [[nodiscard]] std::uint32_t place_of_last() const;
  // By call: where it was called, or for whose gradient. 0: it is not known.
  [[nodiscard]] std::vector<std::uint32_t> places() const;

  // Of the system's clock, in nanoseconds since 1970.
  const std::int64_t begun_at = std::chrono::duration_cast<std::chrono::nanoseconds>(
                                    std::chrono::system_clock::now().time_since_epoch())
                                    .count();
  std::vector<Event> events;
  std::vector<Call> calls;
  std::vector<Value> values;

 private:
  using Clock = std::chrono::steady_clock;

  [[nodiscard]] double now() const;
  [[nodiscard]] Call& last() { return calls.back(); }
  void add(What what, Id index, float score = 0);
  // The call that made the node which `call` works for; kNone if that was none of ours.
  [[nodiscard]] Id forward_of(Id call) const;

  const Table& root_;
  const Clock::time_point begun_ = Clock::now();
};

}  // namespace rematfn
