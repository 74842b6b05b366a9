// SPDX-License-Identifier: Apache-2.0
//
// contest.h: which of a few plans is the fastest, as the calls that follow them show.
//
// Note [The clock decides between plans that move]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// How much longer operators take while copies are on their way, and the copies while operators run, no
// simulation foretells within some percent; and as near to each other are often the best of the
// plans that move, of those that drop, and of those that do either. So when the search is over, calls
// follow each of these in turn, and from then on the one whose calls took least. A machine that others
// use as well may be half as fast again for a minute, which is more than the plans differ by; so what a
// call took is compared with the calls of its round, and with no others. The median of the rounds
// decides. The first two do not count: leads are learnt in them. What is slower by more than chance
// explains takes no further part: in a round the ratio of two plans spreads by some 4 to 10 % (measured),
// and the more rounds there are, the less chance is left. Two decide nothing: a disk may be slow for some
// seconds, in which who moves less is ahead. A plan that is foretold to be clearly slower is not tried.
// Where an accelerator computes, the clock of the host does not tell what a call takes, and the simulation
// decides alone; so it does for plans that only drop, whose operators take what they take anywhere.
//
// A plan that both moves and drops may cascade: a copy that comes later than foretold has a replay evict what
// the next one reads. For that no clock is needed: a call whose replays have cost more than
// Guide::most_replayed() puts its plan out at once, the last one, too. Another takes its place if it is
// foretold to be about as good, or if there is none left; and all begin anew.

#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "engine/feedback.h"

namespace rematfn {

struct Plan;

// A plan, and what has been learnt of it.
struct Followed {
  std::shared_ptr<const Plan> plan;
  std::shared_ptr<Leads> leads{};  // null where nothing moves
};

// Any thread.
class Contest {
 public:
  // At least one; the best comes first, as far as is known. The first `racing` take part. The others stand
  // by: the first `substitutes` of them for each that breaks, the rest for the last one.
  explicit Contest(const std::vector<Followed>& plans, std::size_t racing, std::size_t substitutes = 0);

  // Which the next call is to follow.
  [[nodiscard]] Followed next() const;
  // Whether that is the last word, unless it breaks.
  [[nodiscard]] bool is_decided() const;
  // A call has followed `plan`. `seconds`: kNever if not to its end; then the plan is out.
  void note(const Plan& plan, double seconds);
  // A call that has followed `plan` replayed far more than was foretold.
  void note_broken(const Plan& plan);

 private:
  struct Entrant {
    Followed followed;
    std::vector<double> seconds{};  // of each of its calls
    bool takes_part = true;
    bool broken = false;
  };
  static constexpr std::size_t kUncounted = 2;  // rounds
  static constexpr std::size_t kLeast = 4;  // that count, before one is out
  static constexpr std::size_t kRounds = 16;
  static constexpr double kChance = 0.2;  // by so much over the root of the rounds

  // The mutex is held.
  [[nodiscard]] std::size_t rounds() const;  // that all have been followed in
  // What its calls took, the fastest of each round being one.
  [[nodiscard]] double relative(const Entrant& entrant) const;
  void exclude_slower();
  void enter(Entrant& entrant);
  [[nodiscard]] bool goes_on() const;  // more than one takes part

  std::vector<Entrant> entrants_;
  std::size_t next_substitute_;
  const std::size_t end_of_substitutes_;
};

}  // namespace rematfn
