// SPDX-License-Identifier: Apache-2.0
//
// rng.h: the state a random operator drew from, so that a replay draws the same.

//
// Note [Random operators take turns]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A replay puts the generator back, draws, and puts the present back. A thread that drew from the
// same generator in between would get numbers that were drawn before, and the replay others than the
// first time. So operators under a level that draw, replays or not, run one at a time, whatever
// their level. Threads that are under no level at all we cannot stop.

#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/MT19937RNGEngine.h>
#include <ATen/core/Tensor.h>

#include <mutex>
#include <optional>
#include <utility>

namespace rematfn {

class Domain;

// A generator's state at one moment. To ask a CPU generator for it as a tensor would allocate, in the middle of a
// budget, from the very allocator that is counted.
class RandomState {
 public:
  explicit RandomState(at::Generator generator);
  void restore() const;
  [[nodiscard]] bool has_moved() const;  // somebody has drawn from the generator, or seeded it
  [[nodiscard]] RandomState present() const { return RandomState(generator_); }

 private:
  struct OfCpu {
    at::mt19937 engine;
    std::optional<float> next_float;  // of a pair of normal numbers, the second
    std::optional<double> next_double;
  };

  at::Generator generator_;
  std::optional<OfCpu> of_cpu_;
  at::Tensor state_;  // of another device's
};

// No other thread runs a random operator under a level while this is held. `domain`, whose lock this
// thread holds, lends while it waits.
[[nodiscard]] std::unique_lock<std::recursive_mutex> take_random_turn(Domain& domain);

}  // namespace rematfn
