// SPDX-License-Identifier: Apache-2.0
//
// rng.h: the state a random operator drew from, so that a replay draws the same.

#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <memory>

namespace rematfn {

// A generator's state at one moment. A CPU generator's is copied as plain memory: asking for it as
// a tensor would allocate, in the middle of a budget, from the very allocator that is counted.
class RandomState {
 public:
  [[nodiscard]] static std::shared_ptr<const RandomState> of(const at::Generator& generator);
  virtual ~RandomState() = default;
  virtual void restore() const = 0;
  [[nodiscard]] virtual std::shared_ptr<const RandomState> present() const = 0;
};

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
