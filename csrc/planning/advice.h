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
// ends there, and more may be needed by what comes after it; the message says so.
//
// Note [What a forward holds, a backward reads]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A first call that is refused in its forward would be refused again in its backward, an operator
// further at each attempt: what a backward needs besides its gradients is what it takes to replay the
// forward. Of the backward nothing is recorded, but what it reads is known: the values that the
// program has read and not let go of. So the record is followed by a backward in its image: from the
// last call to the first, one for each value made inside that the call has read, with its cost and
// scratch. It makes the gradient of that value, from those of the results and from what is held of the
// results and of the other inputs, as in a product; of the value itself, where it is alone. A forward
// may hold values for other reasons, such as a branch that is still to come; the figure may then be more
// than is needed. A backward is expected where something is held and autograd has made a node since the
// level began, on this thread: for a leaf that asks for its gradient, or under a transform of
// torch.func's, around the level or inside.

#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "engine/domain.h"
#include "planning/simulation.h"

namespace rematfn {

// A budget from `least` on in which `trace` runs, about the smallest; none if none was found in time.
// If `options.most_overhead` says how much it may replay, then that; else no absurd amount.
[[nodiscard]] std::optional<std::size_t> enough_for(const Trace& trace, SimulationOptions options,
                                                    std::size_t least);

struct Advice {
  std::size_t budget;
  enum class Covers : std::uint8_t { kNothing, kSoFar, kAndBack, kAll } covers = Covers::kNothing;
};

// What fits in that budget, as the end of a sentence that names it.
[[nodiscard]] std::string covered_by(const Advice& advice);

// `refused`: the operator, if it was not one of those that replay for the caller.
// `link`: over which the level may move.
[[nodiscard]] Advice advise(const NoRoom& why, const ObservedCall* refused, bool expects_backward,
                            std::optional<LinkOptions> link = {});

}  // namespace rematfn
