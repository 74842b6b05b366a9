// SPDX-License-Identifier: Apache-2.0
//
// shortening.h: a schedule, made from a run: what of its replays is not needed is left out, or exchanged.
//
// Note [Replays that hindsight spares]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A run by scores replays what it has evicted too early: a score cannot see that two values will be needed
// at once. When the run is over it is known what was in memory at each point of it, and where there was
// room. So the run is taken as a sequence of operators, those of the program and replays. Who reads a
// value reads what was made last; so from a sequence alone follows what has to be in memory when: from
// where it is made to its last reader before it is made again. A replay can be left out if what it
// makes, kept since its last reader, fits. Then it reads nothing either, so that its inputs may go
// earlier, and what was replayed for it alone is left out with it.
//   1. One sweep goes from the end to the beginning, with what is live, and tries to leave out each replay.
//      Going on without it, live values differ until the sweep is where the value was made, or last read,
//      before; there they are what they were, and the rest need not be looked at.
//   2. The first sweeps leave out what saves the most for the memory that it takes, bytes times
//      calls; the last whatever fits.
//   3. It always fits the budget, as the run does, but for what the engine does that is not in a sequence: a constant
//      that the program has dropped may stay for what was made from it. Where room is short by 0.2 % a score chooses
//      what goes, and replays may cascade. The schedule is simulated like any plan, so that it is followed only if it
//      costs less; one that had too little room by a 64th is made anew in as much less room, four times at the most.
// Where values may be moved, it is a run of a plan that drops them: a sequence has no copies.
// Checkmate (Jain et al., MLSys 2020) writes all of this as an integer program; Moccasin (Bartan et al.,
// ICML 2023) chooses intervals in which values are kept. This is a local search from a sequence that fits.
//
// Note [A replay is exchanged for cheaper ones]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Where no replay can be left out alone, one can be if others come in its place: what it made is kept, and where
// that has no room, values go that are not read there, and are replayed before their next readers; so may their
// inputs, in turn. Then whatever has become needless is left out, and the sequence is taken if it costs no more.
// This is an iterated local search (Lourenço et al., 2003) of chains of ejections (Glover, 1996), by chance.
// Where values are marked, or the policy keeps some, only what the run has replayed goes: it went by that.
// docs/design/floor.md has what exchanges bring.
//
// Note [A schedule is squeezed]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Exchanges change little at a time, and stop at what no such change betters. So where they gain no more, every other
// turn begins with a run that follows the schedule in a little less room: where room is short a score chooses what
// goes. The replays of that run, mostly several times as many, are then shortened and exchanged in all the room that
// there is. It is a strategic oscillation (Glover, 1977) around the budget.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/schedule.h"
#include "engine/trace.h"
#include "planning/simulation.h"

namespace rematfn {

// How long exchanges are tried, in operators simulated in that time; and what their chances depend on.
struct ExchangeLimits {
  std::uint64_t operators = 0;
  std::uint32_t seed = 0;
  bool only_replayed = false;  // only what the run has made again may go: the policy keeps what it may
};

// A schedule for `trace` in `budget`, from the replays of a run. Throws Stopped. `effort` is added to.
[[nodiscard]] std::shared_ptr<const Schedule> shortened(const Trace& trace, std::size_t budget,
                                                        const std::vector<Replayed>& replays,
                                                        Effort& effort, const ExchangeLimits& exchanges);

}  // namespace rematfn
