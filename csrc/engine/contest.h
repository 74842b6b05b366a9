// SPDX-License-Identifier: Apache-2.0
//
// contest.h: which of a few plans is the fastest, as the calls that follow them show.
//
// Note [The clock decides between plans that move]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// How much longer operators take while copies are on their way, and the copies while operators run, no
// simulation foretells within some percent; and as near to each other are often the best of the
// plans that move, of those that drop, and of those that do either. So when the search is over, each of
// these is followed for a few calls, those that are close to the best for a few more, and the one whose
// calls took least from then on. The first call after another plan's does not count: it finds memory as
// that one has left it. Of the others the shortest does, since what disturbs a call makes it longer and
// never shorter. A plan that is foretold to be clearly slower is not tried. Where an accelerator
// computes, the clock of the host does not tell what a call takes, and the simulation decides alone; so
// it does for plans that only drop, whose operators take what they take anywhere.

#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "engine/trace.h"

namespace rematfn {

class Leads;
struct Plan;

// A plan, and what has been learnt of it.
struct Followed {
  std::shared_ptr<const Plan> plan;
  std::shared_ptr<Leads> leads{};  // null where nothing moves
};

// Any thread.
class Contest {
 public:
  // At least one; the best comes first, as far as is known.
  explicit Contest(const std::vector<Followed>& plans);

  // Which the next call is to follow.
  [[nodiscard]] Followed next() const;
  // A call has followed `plan`. `seconds`: kNever if not to its end; then the plan is out.
  void note(const Plan& plan, double seconds);

 private:
  struct Entrant {
    Followed followed;
    int calls = 0;
    double least = kNever;  // seconds of a call
  };
  static constexpr int kCalls = 3;      // of each; the first does not count
  static constexpr int kCallsInAll = 7;  // of those that are close; the first of the rest does not count
  static constexpr double kClose = 1.05;

  // Whether calls of it are still to come. The mutex is held.
  [[nodiscard]] bool is_open(const Entrant& entrant) const;
  [[nodiscard]] const Entrant& best() const;

  mutable std::mutex mutex_;
  std::vector<Entrant> entrants_;
};

}  // namespace rematfn
