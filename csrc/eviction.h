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

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace rematfn {

// The price of the smallest operator, in seconds of the cost model. It is also the least age: a
// value touched just now is as old as one small operator, never infinitely fresh.
inline constexpr double kOperatorCost = 5e-6;

enum class ScoreKind : std::uint8_t {
  kOn,       // see Score
  kDtr,      // (cost + evicted ancestors and descendants) / (bytes * age)        Kirisame 2021, h_DTR
  kEq,       // the same over undirected components kept by union-find            Kirisame 2021, h_DTR^eq
  kLocal,    // cost / (bytes * age)                                              Kirisame 2021, h_local
  kMsps,     // (cost + evicted ancestors) / bytes                                Peng 2020, Capuchin
  kLru,      // the oldest access
  kLargest,  // the most bytes
};

// What stands for time in kOn, where the next use of a value may be known.
enum class Horizon : std::uint8_t {
  kAge,        // time since the last access, whatever comes
  kGeometric,  // sqrt(age * time to next use)
  kHarmonic,   // 1 / (1/age + 1/next)
  kNearer,     // min(age, next)
  kNext,       // age^(1/4) * next^(3/4)
  kMirrored,   // how far before `front` the last access lies; age, for what was read after it
};

// kOn: (cost + ancestors * evicted ancestors) / (bytes * time^exponent), `unread` times that until the
// value is first read.
struct Score {
  ScoreKind kind = ScoreKind::kOn;
  double ancestors = 0.5;
  double exponent = 0.6;
  double unread = 4;
  Horizon horizon = Horizon::kAge;
  double front = -1;  // program time, for kMirrored: see Note [A backward reads in reverse]
};

inline constexpr double kNever = std::numeric_limits<double>::infinity();
inline constexpr double kUnknown = -1;

struct Candidate {
  double nbytes = 0;
  double cost = 0;         // of the operation that would be replayed, seconds
  double neighbours = 0;   // cost of the evicted neighbourhood, as the score in force defines it
  double last_access = 0;  // program time, seconds
  double next_use = kUnknown;  // program time: when it, or what needs it to be replayed, is read
  double weight = 1;       // of a plan; multiplies the score
  bool consumed = false;   // some operator of the program has read it
  bool pinned = false;     // a running operator needs it: never a victim
  bool pending = false;    // a planned replay will read it: a victim only when nothing else is left
  bool refused = false;    // its storage turned out to be held by somebody else
  bool stale = true;       // `neighbours` must be computed anew before it is compared
};

// The lowest score goes first. `now` is the program time, at least every last_access.
[[nodiscard]] double score(const Score& kind, const Candidate& c, double now);

// Indices of the `most` candidates with the lowest scores, and the lowest score that is left. Candidates with pending readers are considered only with `spare_pending` off.
// The lowest comes first, and the first of equals, so the choice is deterministic.
struct Victims {
  std::vector<std::size_t> indices;
  double lowest_left = kNever;
};
[[nodiscard]] Victims choose_victims(const Score& kind, std::span<const Candidate> candidates,
                                     double now, bool spare_pending, std::size_t most);

}  // namespace rematfn
