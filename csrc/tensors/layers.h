// SPDX-License-Identifier: Apache-2.0
//
// layers.h: the tensors inside a tensor: behind functorch's wrappers, in subclasses of Python's, and those
// that one without plain bytes consists of.

#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

namespace rematfn {

// What a wrapper of functorch's holds; nothing, if the tensor is none.
[[nodiscard]] std::optional<at::Tensor> unwrap_once(const at::Tensor& tensor);

// Visits the tensor and what functorch's wrappers hold, from the outside in; returns the innermost.
template <class Visit>
at::Tensor for_each_layer(const at::Tensor& tensor, Visit&& visit) {
  at::Tensor layer = tensor;
  for (;;) {
    visit(layer);
    const std::optional<at::Tensor> inner = unwrap_once(layer);
    if (!inner.has_value()) return layer;
    layer = *inner;
  }
}

// The innermost tensor behind functorch's wrappers.
[[nodiscard]] at::Tensor innermost(const at::Tensor& tensor);
// A wrapper subclass has no bytes of its own: what a level sees are the tensors that it holds.
[[nodiscard]] std::vector<at::Tensor> held_by_subclass(const at::Tensor& tensor);
// Visits the tensors with plain bytes that another kind of tensor consists of: the indices and values of
// a sparse one, the buffer, sizes, strides and offsets of a nested one, scales and zero points.
void for_each_part(const at::Tensor& tensor, const std::function<void(const at::Tensor&)>& visit);
// Visits the innermost tensor and its parts or, if it is a subclass of Python's, those that it holds.
void for_each_innermost(const at::Tensor& tensor,
                        const std::function<void(const at::Tensor&)>& visit);
// Says which tensors a subclass of Python's holds. bindings.cpp sets it.
using Unwrapper = std::vector<at::Tensor> (*)(const at::Tensor&);
void set_unwrapper(Unwrapper unwrapper);

}  // namespace rematfn
