// SPDX-License-Identifier: Apache-2.0
//
// simulation.h: the engine, run on a trace.
//
// Note [One engine for tensors and numbers]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A plan is only worth as much as the simulator that judged it. So there is no second engine: a
// simulation is a Domain whose replay() moves numbers, and whoever evicts, plans and replays is the
// code that does it for tensors. What is written twice is the journey of one operator, in LevelCall
// and in Simulation::run_call, and a test holds the two together, count for count.

#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "engine/table.h"
#include "engine/trace.h"
#include "policy/floor.h"

namespace rematfn {

class Guide;

// What simulations have done so far, and whether they are to end.
struct Effort {
  std::atomic<std::uint64_t> operators{0};  // replays among them
  std::atomic<bool> stop{false};
};
// Thrown by a simulation that was told to stop.
struct Stopped {};

// A level inside the outermost, around these calls of the program.
struct InnerLevel {
  std::size_t first_call = 0;
  std::size_t last_call = 0;  // still inside
  std::size_t budget = kNoBudget;
  std::vector<Way*> ways{};  // none: dropping
};

struct SimulationOptions {
  std::size_t budget = kNoBudget;
  Score score;
  Keeping keeping{};
  Judge judge{};
  bool evict_everything = false;
  std::shared_ptr<Guide> guide{};
  double most_replayed_cost = kNever;  // seconds; beyond, the run is not worth finishing
  Effort* effort = nullptr;  // to add to, and to stop by
  bool check = false;        // the tables after each event
  std::vector<Way*> ways{};  // none: dropping
  std::optional<InnerLevel> inner{};
  FloorRules floor{};
};

// The statistics of a run of `trace`. Throws NoRoom and Stopped.
[[nodiscard]] Statistics simulate(const Trace& trace, const SimulationOptions& options);

}  // namespace rematfn
