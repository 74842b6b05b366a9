// SPDX-License-Identifier: Apache-2.0
//
// advice.h: which budget to ask for where one was too small.
//
// Note [The figure is tried out]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// What one operator would have needed beyond what could not go is a lower bound. With just that, the
// same call may end a few operators earlier or later: other values are there then, and replays take
// other ways. So the call's own record is run in the simulator, the operator that was refused
// included, and the figure is a budget in which it fits, as it is printed. On a first call the record
// ends there, and more may be needed by what comes after it; the message says so. A trial begins with
// the least that may do, then halves the way from there to the peak, in which nothing has to go: as
// far as it gets within a number of operators, so that the figure is the same on every machine.
//
// Note [What a forward holds, a backward reads]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A first call that is refused in its forward would be refused again in its backward, an operator
// further at each attempt: what a backward needs besides its gradients is what it takes to replay the
// forward. Of the backward nothing is recorded, but what it reads is known: the values that the
// program has read and not freed. So the record is followed by a backward in its image: from the
// last call to the first, one for each value made inside that the call has read, with its cost and
// scratch. It makes the gradient of that value, from those of the results and from what is held of the
// results and of the other inputs, as in a product; of the value itself, where it is alone. A forward
// may hold values for other reasons, such as a branch that is still to come; the figure may then be more
// than is needed. A backward is expected where something is held and autograd has made a node since the
// level began, on this thread: for a leaf that asks for its gradient, or under a transform of
// torch.func's, around the level or inside. In the middle of a backward what is left of it is done in
// the same way: of the forward's calls those whose values are still held. Which of the values that the
// backward has made are gradients on their way is not known; one of the right size stands for them, and
// room is left for one more, as large as the largest value that is held.

#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "base/errors.h"
#include "engine/domain.h"
#include "planning/simulation.h"

namespace rematfn {

// A budget from `least` on in which `trace` runs, about the smallest; none if none was found in time.
// If `options.most_overhead` says how much it may replay, then that; else no absurd amount.
[[nodiscard]] std::optional<Figure> enough_for(const Trace& trace, SimulationOptions options,
                                               std::size_t least, const Wording& wording);

struct Advice {
  Figure figure;
  enum class Covers : std::uint8_t { kNothing, kSoFar, kAndBack, kAndRest, kAll } covers = Covers::kNothing;

  // After "Raise the budget to".
  [[nodiscard]] std::string in_words() const;
};

// `refused`: the operator, if it was not one of those that replay for the caller. `most_replays`: what
// replays may cost, in multiples of the program. `link`: over which the level may move.
[[nodiscard]] Advice advise(const NoRoom& why, const ObservedCall* refused, bool expects_backward,
                            const Wording& wording, double most_replays, std::optional<LinkOptions> link);

}  // namespace rematfn
