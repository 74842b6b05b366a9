// SPDX-License-Identifier: Apache-2.0
//
// eviction.h: which version to give up next.
//
// Nothing here knows what a tensor is. The table describes each version that may go as a Candidate;
// the functions below compare numbers. That keeps the scores small enough to test by hand.
//
// Note [Staleness is counted in program time]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// DTR divides by the seconds since a tensor was last touched, replays included. Then a busy machine
// evicts other tensors than an idle one, and every replay makes its own intermediates look fresh,
// so that they crowd out what the program will read next. Our clock is the summed cost of the
// program's own operators, each counted once, when it first runs: replays neither advance it nor
// refresh a value. With the deterministic cost model the same program therefore evicts the same
// versions on every run and every machine.

#pragma once

#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace rematfn {

// The price of the smallest operator, in seconds of the cost model. It is also the least age: a
// value touched just now is as old as one small operator, never infinitely fresh.
inline constexpr double kOperatorCost = 5e-6;

// What stands for time in a score, where the next use of a value may be known.
enum class Horizon : std::uint8_t {
  kAge,        // time since the last access, whatever comes
  kGeometric,  // sqrt(age * time to next use)
  kHarmonic,   // 1 / (1/age + 1/next)
  kNearer,     // min(age, next)
  kNext,       // age^(1/4) * next^(3/4)
};

// (cost + ancestors * evicted ancestors) / (bytes * time^exponent), `unread` times that until the
// value is first read.
//
// Note [Ancestors that nobody holds]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// An evicted ancestor that the program still holds is likely to be made again anyway, for whoever reads it
// next; so half of its cost counts. One that the program has dropped is made again for this value alone, as
// is all that lies behind a gradient; that counts in full. With half of all (measured while victims were
// chosen one by one) a U-Net at half of its peak replays 0.16 of the program in place of 0.12, a
// Hessian-vector product 0.21 in place of 0.12, MACE's forces at 0.4 1.55 in place of 0.62.
struct Score {
  double ancestors = 0.5;
  double exponent = 0.6;
  double unread = 4;
  Horizon horizon = Horizon::kAge;
};

inline constexpr double kNever = std::numeric_limits<double>::infinity();
inline constexpr double kUnknown = -1;

// What a score is worked out with that changes while the program runs.
struct ScoreContext {
  double now = 0;  // program time, at least every last access
  double record_now = 0;  // the same in the record that next uses are of
  // Program time; where Horizon::kAge counts, what was last read before it is as old as it lies before.
  // See Note [Near the floor], Rule 1.
  double front = -kNever;
  bool prices_pending = false;  // See Note [Near the floor], Rule 2
};

struct Candidate {
  double nbytes = 0;
  double cost = 0;         // to have it back by its way: a replay's, or a move's; seconds
  double ancestors = 0;    // cost of those that are evicted; twice, of what the program does not hold
  double last_access = 0;  // program time, seconds
  double next_use = kUnknown;  // program time: when it, or what needs it to be replayed, is read
  bool kept = false;       // goes when nothing else can
  bool consumed = false;   // some operator of the program has read it
  bool pinned = false;     // a running operator needs it: never a victim
  bool pending = false;    // a planned replay will read it: a victim only when nothing else is left
  bool refused = false;    // passed over in this choice: it has to stay, or has been picked already
  bool stale = true;       // what is around it has changed: see Note [Stale scores are too low]
};

// The lowest score goes first. What is kept scores above all else, but for a value that is known not to be
// read again: that is free even so.
[[nodiscard]] double score(const Score& s, const Candidate& c, const ScoreContext& context);

// Note [Stale scores are too low]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Each eviction and each replay changes the scores of what is around it, and to know a score is to
// walk the graph. But most candidates are far from going. So what is around an eviction is only
// marked stale: with more ancestors evicted, and a nearer use, its score has risen, and the old
// numbers make one that is too low. Around what comes back scores fall; there the numbers become
// those of a candidate with nothing evicted around it, and again are too low. Whoever looks for the
// lowest score works out anew what is stale at the front, until what stands there is not: that is the
// lowest of all, for the others' can only be higher (lazy evaluation, Minoux 1978). Not all is noticed,
// such as the death of a value that nobody will replay; a score that is too high for that is as good
// as it was when it was worked out.

// Indices of the `most` candidates with the lowest scores, and the lowest score that is left.
// Candidates with pending readers are considered only with `spare_pending` off. The lowest comes first,
// and the first of equals, so the choice is deterministic. `refresh` works out a stale candidate's
// numbers.
struct Victims {
  std::vector<std::size_t> indices;
  double lowest_left = kNever;
};
using Refresh = c10::function_ref<void(std::size_t index)>;
[[nodiscard]] Victims choose_victims(const Score& s, std::span<const Candidate> candidates,
                                     const ScoreContext& context, bool spare_pending,
                                     std::size_t most, Refresh refresh);

}  // namespace rematfn
