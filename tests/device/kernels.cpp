// SPDX-License-Identifier: Apache-2.0
//
// kernels.cpp: what is registered for the device. A few operators are about its memory; all others run
// by the kernels of the CPU.

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <string>
#include <utility>

#include "elsewhere.h"
#include "memory.h"
#include "run_operator.h"
#include "stream.h"

namespace fake {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool> pinned,
                 std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "only memory of the host can be pinned");
  return at::detail::empty_generic(size, c10::GetAllocator(kFake),
                                   DispatchKeySet(DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(kFake),
                                           DispatchKeySet(DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor zero_tensor(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                       std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  static auto* const allocator = new at::native::ZeroTensorAllocator(c10::Device(kFake, 0));
  return at::detail::empty_generic(
      size, allocator, DispatchKeySet({DispatchKey::PrivateUse1, DispatchKey::ZeroTensor}),
      c10::dtype_or_default(dtype), std::nullopt);
}

bool is_pinned(const at::Tensor& tensor) {
  return tensor.is_cpu() && pinned_memory().owns(tensor.storage().data());
}

// Between host and device the copy is asynchronous if asked for, and the host's memory is pinned.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const at::Tensor& host = from.is_cpu() ? from : to;
  const bool within = is_ours(from) && is_ours(to);
  const bool asynchronous = within || (non_blocking && is_pinned(host));
  Stream& stream = current_stream();
  {
    Elsewhere cpu(DispatchKey::CPU);
    // The host's tensor too is one that owns nothing: what is in flight keeps no memory alive.
    const auto bare = [&](const at::Tensor& t) {
      if (!t.is_cpu()) return cpu.convert(t);
      auto made = at::detail::make_tensor<c10::TensorImpl>(
          c10::Storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(),
                       c10::DataPtr(const_cast<void*>(t.storage().data()), c10::kCPU), nullptr,
                       false),
          t.key_set() & DispatchKeySet({DispatchKey::CPU, DispatchKey::Conjugate,
                                        DispatchKey::Negative}),
          t.dtype());
      made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(),
                                                        t.storage_offset());
      return made;
    };
    stream.enqueue("copy_", [to = bare(to), from = bare(from)] { to.copy_(from); });
  }
  if (!asynchronous) {
    stream.wait();
  } else if (!within) {
    const c10::DataPtr& bytes = host.storage().data_ptr();
    pinned_memory().note_use_of_block(bytes.get(), bytes.get_context(), stream.id);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  record_use(tensor.storage().data_ptr(), stream);
}

// The CPU's draws from its own generator, and cannot be told of another.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool> train) {
  if (!train.value_or(true) || p == 0 || input.numel() == 0) {
    return {input.clone(), at::full_like(input, 1, at::kBool)};
  }
  at::Tensor mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  if (p == 1) return {at::zeros_like(input), mask};
  return {input.mul(mask).mul_(1 / (1 - p)), mask};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_efficientzerotensor", &zero_tensor);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("record_stream", &record_stream);
  library.impl("native_dropout", &native_dropout);
  library.impl("resize_", [](const at::Tensor& self, c10::IntArrayRef size,
                             std::optional<at::MemoryFormat> format) -> const at::Tensor& {
    return at::native::resize_(self, size, format);
  });
  library.impl("set_.source_Storage", [](at::Tensor& self, at::Storage storage) -> at::Tensor& {
    return at::native::set_(self, std::move(storage));
  });
  library.impl("set_.source_Storage_storage_offset",
               [](at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                  c10::IntArrayRef stride) -> at::Tensor& {
                 return at::native::set_storage_cpu_(self, std::move(storage), offset, size,
                                                     stride);
               });
  library.impl("set_.source_Tensor", [](at::Tensor& self, const at::Tensor& source) -> at::Tensor& {
    return at::native::set_tensor_(self, source);
  });

  // A decomposition beats a fallback. Where the CPU has a kernel of its own we do as the CPU does, to
  // the bit; these two look for the CPU's kernel by themselves.
  auto own = [&](const c10::OperatorName& name) {
    library.impl(c10::toString(name).c_str() + std::string("aten::").size(),
                 torch::CppFunction::makeFromBoxedFunction<&run_operator>());
  };
  own({"aten::convolution", ""});
  own({"aten::convolution_backward", ""});
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    const auto has = [&](DispatchKey key) { return op->hasKernelForDispatchKey(key); };
    if (name.name.rfind("aten::", 0) != 0 || name.name == "aten::_fused_sdp_choice") continue;
    if (has(DispatchKey::CPU) && !has(DispatchKey::PrivateUse1) &&
        (has(DispatchKey::CompositeExplicitAutograd) ||
         has(DispatchKey::CompositeExplicitAutogradNonFunctional) ||
         has(DispatchKey::CompositeImplicitAutograd))) {
      own(name);
    }
  }
}

// A copy resolves these bits: to resolve them beforehand would take a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace
}  // namespace fake
