// SPDX-License-Identifier: Apache-2.0
//
// refusals.h: what a level says when its budget is too small, and which would do.

#pragma once

#include <string>

#include "base/errors.h"
#include "levels/level.h"

namespace rematfn {

// Makes all of `wanted` resident for `level`, or raises BudgetError. `what` reads them.
void materialize_for(Level& level, c10::ArrayRef<Version*> wanted, const std::string& what);
// Raises BudgetError if the replays of the outermost level cost more than they may.
// Note [A call that thrashes is stopped]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A call of which nothing is known may replay a hundred times the program before it is over, and judged.
// But what the program will cost is not known while it runs. To compare with what it has cost so far
// would refuse calls that keep to their limit in the end: a forward replays, and the backward that
// pays for it has not begun. So it is compared with three times the forward, once a backward is to be
// expected: a backward costs about twice its forward. Where autograd records what runs, a backward of it
// is still to come. Of a few replays nothing can be told. What passes the limit only at its end is
// judged when it is over. A call is stopped before an operator begins, so that nothing is half done.
void stop_if_thrashing(Level& level);
// `in_kernel`: what has begun, and may ask for more.
[[noreturn]] void raise_budget_error(const NoRoom& why, const std::string& what,
                                     const ObservedCall* refused = nullptr, bool in_kernel = false);

}  // namespace rematfn
