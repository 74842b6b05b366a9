// SPDX-License-Identifier: Apache-2.0
#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstring>

#include "stream.h"

namespace fake {

Generator::Generator()
    : c10::GeneratorImpl(c10::Device(kFake, 0),
                         c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

at::Generator Generator::next() {
  return at::detail::createCPUGenerator(seed_ * 0x9E3779B97F4A7C15 + ++drawn_);
}

void Generator::set_current_seed(std::uint64_t seed) {
  seed_ = seed;
  drawn_ = 0;
}

std::uint64_t Generator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

// Two numbers in a tensor of bytes on the CPU, as for the generators of other devices.
// Neither may be done while a stream is captured, as in CUDA.
c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  refuse_if_captured(current_stream().id);
  const std::uint64_t numbers[] = {seed_, drawn_};
  at::Tensor state = at::empty({sizeof numbers}, at::kByte);
  std::memcpy(state.data_ptr(), numbers, sizeof numbers);
  return state.getIntrusivePtr();
}

void Generator::set_state(const c10::TensorImpl& state) {
  refuse_if_captured(current_stream().id);
  std::uint64_t numbers[2];
  TORCH_CHECK(state.dtype() == at::kByte && state.numel() == sizeof numbers,
              "the state of a fake generator has ", sizeof numbers, " bytes");
  std::memcpy(numbers, state.data(), sizeof numbers);
  seed_ = numbers[0];
  drawn_ = numbers[1];
}

Generator* Generator::clone_impl() const {
  auto* copy = new Generator;
  copy->seed_ = seed_;
  copy->drawn_ = drawn_;
  return copy;
}

const at::Generator& default_generator() {
  static const at::Generator instance = at::make_generator<Generator>();
  return instance;
}

TORCH_LIBRARY(fake_device, library) {
  library.def("default_generator() -> Generator?", [] { return default_generator(); });
}

}  // namespace fake
