// SPDX-License-Identifier: Apache-2.0
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/functorch/TensorWrapper.h>

#include "tensors/layers.h"

#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>

namespace rematfn {
namespace {

Unwrapper the_unwrapper = nullptr;

}  // namespace

std::optional<at::Tensor> unwrap_once(const at::Tensor& tensor) {
  if (const auto* wrapper = at::functorch::maybeGetTensorWrapper(tensor)) [[unlikely]] return wrapper->value();
  if (const auto* batched = at::functorch::maybeGetBatchedImpl(tensor)) return batched->value();
  if (at::functionalization::impl::isFunctionalTensor(tensor)) [[unlikely]] {
    return at::functionalization::impl::unsafeGetFunctionalWrapper(tensor)->value();
  }
  return std::nullopt;
}

std::vector<at::Tensor> held_by_subclass(const at::Tensor& tensor) {
  if (the_unwrapper == nullptr || !tensor.key_set().has(c10::DispatchKey::Python)) [[likely]] return {};
  return the_unwrapper(tensor);
}

at::Tensor innermost(const at::Tensor& tensor) {
  return for_each_layer(tensor, [](const at::Tensor&) {});
}

void for_each_part(const at::Tensor& tensor, const std::function<void(const at::Tensor&)>& visit) {
  constexpr c10::DispatchKeySet kHaveParts({c10::DispatchKey::Sparse, c10::DispatchKey::SparseCsr,
                                            c10::DispatchKey::NestedTensor,
                                            c10::DispatchKey::Quantized});
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!impl->key_set().has_any(kHaveParts)) [[likely]] return;
  // Others may have these keys: wrappers, and the jagged tensors of Python's.
  if (const auto* sparse = dynamic_cast<at::SparseTensorImpl*>(impl)) {
    visit(sparse->indices());
    visit(sparse->values());
  } else if (const auto* compressed = dynamic_cast<at::SparseCsrTensorImpl*>(impl)) {
    visit(compressed->compressed_indices());
    visit(compressed->plain_indices());
    visit(compressed->values());
  } else if (const auto* nested = dynamic_cast<at::native::NestedTensorImpl*>(impl)) {
    visit(nested->get_unsafe_storage_as_tensor());
    visit(nested->get_nested_sizes());
    visit(nested->get_nested_strides());
    visit(nested->get_storage_offsets());
  } else if (auto* quantised = dynamic_cast<at::QTensorImpl*>(impl)) {
    const at::QuantizerPtr quantizer = quantised->quantizer();
    const auto* channels = dynamic_cast<const at::PerChannelAffineQuantizer*>(quantizer.get());
    if (channels == nullptr) return;
    visit(channels->scales());
    visit(channels->zero_points());
  }
}

void for_each_innermost(const at::Tensor& tensor,
                        const std::function<void(const at::Tensor&)>& visit) {
  const at::Tensor inner = innermost(tensor);
  const std::vector<at::Tensor> held = held_by_subclass(inner);
  for (const at::Tensor& part : held) for_each_innermost(part, visit);
  if (!held.empty()) [[unlikely]] return;
  visit(inner);
  for_each_part(inner, visit);
}

void set_unwrapper(Unwrapper unwrapper) { the_unwrapper = unwrapper; }

}  // namespace rematfn
