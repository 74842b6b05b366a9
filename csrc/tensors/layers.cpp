// SPDX-License-Identifier: Apache-2.0
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/functorch/TensorWrapper.h>

#include "tensors/layers.h"

#include <ATen/FunctionalTensorWrapper.h>

namespace rematfn {
namespace {

Unwrapper the_unwrapper = nullptr;

}  // namespace

std::optional<at::Tensor> unwrap_once(const at::Tensor& tensor) {
  if (const auto* wrapper = at::functorch::maybeGetTensorWrapper(tensor)) return wrapper->value();
  if (const auto* batched = at::functorch::maybeGetBatchedImpl(tensor)) return batched->value();
  if (at::functionalization::impl::isFunctionalTensor(tensor)) {
    return at::functionalization::impl::unsafeGetFunctionalWrapper(tensor)->value();
  }
  return std::nullopt;
}

std::vector<at::Tensor> held_by_subclass(const at::Tensor& tensor) {
  if (the_unwrapper == nullptr || !tensor.key_set().has(c10::DispatchKey::Python)) return {};
  return the_unwrapper(tensor);
}

at::Tensor innermost(const at::Tensor& tensor) {
  return for_each_layer(tensor, [](const at::Tensor&) {});
}

void for_each_innermost(const at::Tensor& tensor,
                        const std::function<void(const at::Tensor&)>& visit) {
  const at::Tensor inner = innermost(tensor);
  const std::vector<at::Tensor> held = held_by_subclass(inner);
  for (const at::Tensor& part : held) for_each_innermost(part, visit);
  if (held.empty()) visit(inner);
}

void set_unwrapper(Unwrapper unwrapper) { the_unwrapper = unwrapper; }

}  // namespace rematfn
