// SPDX-License-Identifier: Apache-2.0
//
// elsewhere.h: a call's arguments as another backend's.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <optional>
#include <utility>
#include <vector>

#include "stream.h"

namespace fake {

inline bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kFake;
}

// Arguments as tensors of another backend: CPU tensors on the same bytes (or on none, where only their
// shapes are asked for), or meta tensors. Tensors that share a storage share its counterpart.
class Elsewhere {
 public:
  explicit Elsewhere(c10::DispatchKey backend, bool with_bytes = true)
      : backend_(backend), with_bytes_(with_bytes) {}

  at::Tensor convert(const at::Tensor& tensor) {
    if (!tensor.defined() || (!is_ours(tensor) && backend_ == c10::DispatchKey::CPU)) return tensor;
    if (!is_ours(tensor) && tensor.dim() == 0) return tensor;  // a number
    c10::DispatchKeySet keys(backend_);
    if (tensor.is_conj()) keys = keys.add(c10::DispatchKey::Conjugate);
    if (tensor.is_neg()) keys = keys.add(c10::DispatchKey::Negative);
    auto made = at::detail::make_tensor<c10::TensorImpl>(convert(tensor.storage()), keys,
                                                         tensor.dtype());
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    return made;
  }

  c10::IValue convert(const c10::IValue& value) {
    if (value.isTensor()) return convert(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(convert(t));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector()) {
        list.push_back(t ? std::optional(convert(*t)) : std::nullopt);
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == kFake) {
      return c10::Device(backend_ == c10::DispatchKey::CPU ? c10::kCPU : c10::kMeta);
    }
    return value;
  }

  // The storage of ours that `made` stands on, or null.
  [[nodiscard]] const c10::Storage* original_of(const at::Tensor& made) const {
    for (const auto& [ours, theirs] : storages_) {
      if (theirs.unsafeGetStorageImpl() == made.storage().unsafeGetStorageImpl()) return &ours;
    }
    return nullptr;
  }

 private:
  c10::Storage convert(const c10::Storage& storage) {
    for (const auto& [ours, theirs] : storages_) {
      if (ours.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) return theirs;
    }
    const bool on_cpu = backend_ == c10::DispatchKey::CPU;
    void* bytes = on_cpu && with_bytes_ ? const_cast<void*>(storage.data()) : nullptr;
    c10::Storage made(c10::Storage::use_byte_size_t(), storage.nbytes(),
                      c10::DataPtr(bytes, on_cpu ? c10::kCPU : c10::kMeta),
                      on_cpu ? nullptr : c10::GetAllocator(c10::kMeta), /*resizable=*/!on_cpu);
    storages_.emplace_back(storage, made);
    return made;
  }

  c10::DispatchKey backend_;
  bool with_bytes_;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;
};

inline torch::jit::Stack converted(Elsewhere& to, c10::ArrayRef<c10::IValue> arguments) {
  torch::jit::Stack stack;
  for (const c10::IValue& value : arguments) stack.push_back(to.convert(value));
  return stack;
}

template <typename F>
void for_each_tensor(const c10::IValue& value, const F& f) {
  if (value.isTensor()) f(value.toTensor());
  if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorVector()) f(t);
  }
  if (value.isOptionalTensorList()) {
    for (const auto& t : value.toOptionalTensorVector()) {
      if (t) f(*t);
    }
  }
}

}  // namespace fake
