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

#pragma once

#include <cstddef>
#include <optional>

#include "domain.h"
#include "simulation.h"

namespace rematfn {

// A budget from `least` on in which `trace` runs, about the smallest; none if none was found in time.
[[nodiscard]] std::optional<std::size_t> enough_for(const Trace& trace, SimulationOptions options,
                                                    std::size_t least);

struct Advice {
  std::size_t budget;
  enum class Covers : std::uint8_t { kNothing, kSoFar, kAll } covers = Covers::kNothing;
};

// `refused`: the operator, if it was not one of those that replay for the caller.
[[nodiscard]] Advice advise(const NoRoom& why, const ObservedCall* refused, bool evict_everything);

}  // namespace rematfn
