// SPDX-License-Identifier: Apache-2.0
//
// plan.h: how the next run of a program chooses its victims.

#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/schedule.h"
#include "policy/eviction.h"

namespace rematfn {

// What a plan does with a value that can be moved and can be dropped. What is cheaper depends on what
// else is evicted, so that calls differ in it; by value it has been decided once and for all.
enum class Preference : std::uint8_t { kCheaper, kMoving, kDropping, kByValue };
constexpr std::size_t kPreferences = 4;

constexpr std::size_t index_of(Preference preference) {
  return static_cast<std::size_t>(preference);
}

// By preference: whether a plan that has it broke. See Note [Plans that break].
using Broken = std::array<std::atomic<bool>, kPreferences>;

// How to choose victims on the next run.
struct Plan {
  Score score;
  std::vector<bool> kept{};      // by value; empty: none
  // By value: goes by a copy before its room is wanted; under kByValue, no other does. Empty: none.
  std::vector<bool> moved{};
  double link_price = 1;  // See Note [What moving costs]
  Preference prefers = Preference::kCheaper;
  double lead = 4;        // a return begins so many times earlier than it takes
  double overhead = kNever;  // seconds of replays and of waiting, as simulated; kNever: it does not fit
  double replayed = kNever;  // of replays alone
  std::shared_ptr<const Schedule> schedule{};  // or null: all is left to the score
  bool shortened = false;  // its run is to be; then there is a schedule
  bool carried_over = false;  // its schedule is that of another record of the same program
  bool online = false;  // the level's own policy, and no more: as a call that nothing is known of
};

}  // namespace rematfn
