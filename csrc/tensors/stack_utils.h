// SPDX-License-Identifier: Apache-2.0
//
// stack_utils.h: visiting the tensors of a boxed call.
//
// Note [The stack is borrowed]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A tensor list on the stack may be the very list the caller holds. We read lists in place, and
// write only to copies.

#pragma once

#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <optional>

namespace rematfn {

// Calls visit(const at::Tensor&, index) for each defined tensor in `value`; index is -1 for a lone
// tensor, else its place in the list. False if `value` holds tensors in a form we cannot take apart.
template <class Visit>
bool for_each_tensor(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    if (const at::Tensor& tensor = value.toTensor(); tensor.defined()) visit(tensor, -1);
    return true;
  }
  if (!value.isList()) return !value.isGenericDict() && !value.isTuple();
  if (value.isTensorList()) {
    const auto list = value.toTensorList();
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (const at::Tensor tensor = list[i]; tensor.defined()) visit(tensor, static_cast<int>(i));
    }
    return true;
  }
  if (value.isOptionalTensorList()) {
    const auto list = value.toOptionalTensorList();
    for (std::size_t i = 0; i < list.size(); ++i) {
      const std::optional<at::Tensor> tensor = list[i];
      if (tensor.has_value() && tensor->defined()) visit(*tensor, static_cast<int>(i));
    }
    return true;
  }
  const auto kind = value.type()->containedType(0)->kind();
  return kind != c10::TypeKind::ListType && kind != c10::TypeKind::AnyType;
}

}  // namespace rematfn
