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

#include <memory>
#include <mutex>

namespace rematfn {

class Domain;

// A generator's state at one moment. A CPU generator's is copied as plain memory: asking for it as
// a tensor would allocate, in the middle of a budget, from the very allocator that is counted.
class RandomState {
 public:
  [[nodiscard]] static std::shared_ptr<const RandomState> of(const at::Generator& generator);
  virtual ~RandomState() = default;
  virtual void restore() const = 0;
  [[nodiscard]] std::shared_ptr<const RandomState> present() const { return of(generator_); }

 protected:
  explicit RandomState(at::Generator generator) : generator_(std::move(generator)) {}

  const at::Generator generator_;
};

// For a scope: no other thread runs a random operator under a level.
class RandomTurn {
 public:
  // `domain`, whose lock this thread holds, lends while it waits.
  explicit RandomTurn(Domain& domain);
  ~RandomTurn();
  RandomTurn(const RandomTurn&) = delete;
  RandomTurn& operator=(const RandomTurn&) = delete;

 private:
  std::recursive_mutex& mutex_;
};
// In a forked child: nobody else has a turn.
void forget_turns_after_fork();

// For a scope: the generator is in `state`; afterwards, where it was before.
class RandomScope {
 public:
  explicit RandomScope(const std::shared_ptr<const RandomState>& state);
  ~RandomScope();
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

 private:
  std::shared_ptr<const RandomState> saved_;
};

}  // namespace rematfn
