// SPDX-License-Identifier: Apache-2.0
//
// generator.h: random numbers of the device, by counter.
//
// A kernel draws when its stream comes to it; the program may ask for the generator's state, or set it,
// long before. So the state is a seed and a counter that each random operator takes a number from as it
// is enqueued, as CUDA's is; the kernel draws from a CPU generator that is seeded with the two.

#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>

namespace fake {

class Generator final : public c10::GeneratorImpl {
 public:
  Generator();

  // A CPU generator for the next operator.
  [[nodiscard]] at::Generator next();

  void set_current_seed(std::uint64_t seed) override;
  void set_offset(std::uint64_t offset) override { drawn_ = offset; }
  std::uint64_t get_offset() const override { return drawn_; }
  std::uint64_t current_seed() const override { return seed_; }
  std::uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

 private:
  Generator* clone_impl() const override;

  std::uint64_t seed_ = c10::default_rng_seed_val;
  std::uint64_t drawn_ = 0;
};

[[nodiscard]] const at::Generator& default_generator();

}  // namespace fake
