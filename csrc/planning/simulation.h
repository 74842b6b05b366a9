// SPDX-License-Identifier: Apache-2.0
//
// simulation.h: the engine, run on a trace.

#pragma once

#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "engine/link.h"
#include "engine/table.h"
#include "engine/trace.h"

namespace rematfn {

class Guide;

// Thrown by a simulation that was told to stop, or that has done the most it may.
struct Stopped {};

// What simulations have done so far, and whether they are to end.
struct Effort {
  // So many operators more, or what takes as long. Throws Stopped.
  void note(std::uint64_t more) {
    if (stop.load(std::memory_order_relaxed)) throw Stopped{};
    if (operators.fetch_add(more, std::memory_order_relaxed) >= most) throw Stopped{};
  }

  std::atomic<std::uint64_t> operators{0};  // replays among them
  std::atomic<bool> stop{false};
  std::uint64_t most = std::numeric_limits<std::uint64_t>::max();  // operators
  // Whether what takes as long as an operator counts as one: some walks over the record, or a look at
  // some operations of it. Where next to nothing fits, that is most of the time.
  bool counts_walks = false;
};

// A link that the outermost level may move over.
struct LinkOptions {
  LinkFigures figures;
  std::size_t room = 0;  // bytes, at its other end
  bool drops = true;     // versions may be dropped as well
  std::optional<LinkFigures> packing{};  // and packed, with another tier's figures
};

struct SimulationOptions {
  std::size_t budget = kNoBudget;
  Policy policy{};
  std::shared_ptr<Guide> guide{};
  double most_overhead = kNever;  // seconds; beyond, the run is not worth finishing
  Effort* effort = nullptr;  // to add to, and to stop by; or one of its own
  std::optional<LinkOptions> link{};  // none: dropping
  // For tests: before each event, and after the last. The program runs in `innermost`, which it may replace.
  std::function<void(Table& outermost, Ref<Table>& innermost)> between{};
};

struct Replayed {
  std::uint32_t event;  // of the trace: which it came before, or was part of
  std::uint32_t call;
};

// What a run has done beyond its statistics.
struct Deeds {
  std::vector<bool> moved;  // by value: over the link; empty without one
  std::vector<Replayed> replays;  // in order
};

// The statistics of a run of `trace`. Throws NoRoom and Stopped.
[[nodiscard]] Statistics simulate(const Trace& trace, const SimulationOptions& options,
                                  Deeds* deeds = nullptr);

}  // namespace rematfn
