// SPDX-License-Identifier: Apache-2.0
//
// Operators as an extension in C++ defines them. Their kernels read and write by pointer.

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cmath>
#include <tuple>
#include <vector>

namespace {

at::Tensor wave(const at::Tensor& x, double scale) {
  const at::Tensor source = x.contiguous();
  at::Tensor result = at::empty_like(source);
  const float* from = source.const_data_ptr<float>();
  float* to = result.mutable_data_ptr<float>();
  for (int64_t i = 0; i < source.numel(); ++i) to[i] = std::sin(from[i] * float(scale));
  return result;
}

std::tuple<at::Tensor, at::Tensor> ends(const at::Tensor& x) {
  const int64_t half = x.size(0) / 2;
  return {x.narrow(0, 0, half), x.narrow(0, half, x.size(0) - half)};
}

void add_to_all_(at::TensorList xs, const at::Tensor& y) {
  const at::Tensor summand = y.contiguous();
  for (const at::Tensor& x : xs) {
    TORCH_CHECK(x.is_contiguous() && x.numel() == summand.numel());
    float* to = x.mutable_data_ptr<float>();
    for (int64_t i = 0; i < x.numel(); ++i) to[i] += summand.const_data_ptr<float>()[i];
  }
}

std::vector<at::Tensor> powers(const at::Tensor& x, int64_t count) {
  std::vector<at::Tensor> results;
  for (int64_t i = 0; i < count; ++i) results.push_back(i == 0 ? x.clone() : results.back() * x);
  return results;
}

at::Tensor jitter(const at::Tensor& x) {
  at::Tensor noise = at::empty_like(x);
  noise.uniform_();
  return x + noise;
}

// What a product on a GPU asks for.
at::Tensor marked(const at::Tensor& x) { return x + at::NoTF32Guard::should_disable_tf32(); }

// As linalg_pinv does it: it decomposes into operators that see the mark.
at::Tensor without_tf32(const at::Tensor& x) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("rematfn_cpp_tests::marked", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  const at::NoTF32Guard without;
  return op.call(x * 2);
}

at::Tensor wave_of_wave(const at::Tensor& x) { return wave(wave(x, 2) + x, 3); }

}  // namespace

TORCH_LIBRARY(rematfn_cpp_tests, m) {
  m.def("wave(Tensor x, float scale) -> Tensor");
  m.def("ends(Tensor(a) x) -> (Tensor(a), Tensor(a))");
  m.def("add_to_all_(Tensor(a!)[] xs, Tensor y) -> ()");
  m.def("powers(Tensor x, int count) -> Tensor[]");
  m.def("jitter(Tensor x) -> Tensor", {at::Tag::nondeterministic_seeded});
  m.def("marked(Tensor x) -> Tensor");
  m.def("without_tf32(Tensor x) -> Tensor", &without_tf32);
  // It decomposes into calls that no dispatcher sees.
  m.def("wave_of_wave(Tensor x) -> Tensor", &wave_of_wave);
}

TORCH_LIBRARY_IMPL(rematfn_cpp_tests, CPU, m) {
  m.impl("wave", &wave);
  m.impl("ends", &ends);
  m.impl("add_to_all_", &add_to_all_);
  m.impl("powers", &powers);
  m.impl("jitter", &jitter);
  m.impl("marked", &marked);
}
