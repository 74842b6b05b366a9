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
#include <ATen/core/Tensor.h>

#include <mutex>
#include <utility>

namespace rematfn {

class Domain;

// A generator's state at one moment. A CPU generator is copied: asking for its state as a tensor
// would allocate, in the middle of a budget, from the very allocator that is counted.
class RandomState {
 public:
  explicit RandomState(at::Generator generator);
  void restore() const;
  [[nodiscard]] RandomState present() const { return RandomState(generator_); }

 private:
  at::Generator generator_;
  at::Generator copy_;  // of a CPU's
  at::Tensor state_;    // of another device's
};

// No other thread runs a random operator under a level while this is held. `domain`, whose lock this
// thread holds, lends while it waits.
[[nodiscard]] std::unique_lock<std::recursive_mutex> take_random_turn(Domain& domain);

}  // namespace rematfn
