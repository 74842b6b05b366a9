// SPDX-License-Identifier: Apache-2.0
//
// stack_utils.h: visiting the tensors of a boxed call.
//
// Note [The stack is borrowed]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A tensor list on the stack may be the very list the caller holds. We read lists in place, and
// write only to copies.
//
// Note [TorchScript has lists of its own]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// The indices of `x[i]` are a list whose elements may be none. What TorchScript makes for them has another
// type object than C++ has for the same type, and `isOptionalTensorList` compares the objects: it says no.
// So lists are told by the kinds of their elements.

#pragma once

#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <vector>

namespace rematfn {

[[nodiscard]] inline bool is_tensor(const c10::Type& type) {
  const bool is_optional = type.kind() == c10::TypeKind::OptionalType;
  return (is_optional ? *type.containedType(0) : type).kind() == c10::TypeKind::TensorType;
}

// `Tensor[]`, or `Tensor?[]`. See Note [TorchScript has lists of its own]
[[nodiscard]] inline bool is_tensor_list(const c10::IValue& value) {
  return value.isList() && is_tensor(*value.toList().elementType());
}

// Calls visit(const at::Tensor&, index) for each defined tensor in `value`; index is -1 for a lone
// tensor, else its place in the list. False if `value` holds tensors in a form we cannot take apart.
template <class Visit>
bool for_each_tensor(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    if (const at::Tensor& tensor = value.toTensor(); tensor.defined()) visit(tensor, -1);
    return true;
  }
  if (!value.isList()) return !value.isGenericDict() && !value.isTuple();
  const c10::TypePtr element = value.toList().elementType();
  if (!is_tensor(*element)) {
    return element->kind() != c10::TypeKind::ListType && element->kind() != c10::TypeKind::AnyType;
  }
  int index = 0;
  for (const c10::IValue& each : value.toListRef()) {
    if (each.isTensor() && each.toTensor().defined()) visit(each.toTensor(), index);
    ++index;
  }
  return true;
}

// The same without an index, in lists of lists too, which collectives take.
template <class Visit>
void for_each_nested_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef()) for_each_nested_tensor(each, visit);
  }
}

// All that for_each_tensor() visits.
[[nodiscard]] inline std::vector<at::Tensor> tensors_in(c10::ArrayRef<c10::IValue> values) {
  std::vector<at::Tensor> found;
  for (const c10::IValue& value : values) {
    for_each_tensor(value, [&](const at::Tensor& tensor, int) { found.push_back(tensor); });
  }
  return found;
}

}  // namespace rematfn
