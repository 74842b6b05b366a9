// SPDX-License-Identifier: Apache-2.0
//
// torch_compat.h: every difference between the torch versions we compile against, 2.11 to 2.15.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/function.h>
#include <torch/version.h>

#include <dlfcn.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "tensors/torch_layout.h"

#define REMATFN_TORCH_AT_LEAST(minor) \
  (TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= (minor)))

namespace rematfn {

inline void forbid_access(c10::StorageImpl& storage, const char* message) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
}

#if !REMATFN_TORCH_AT_LEAST(12)
// 2.11 sets this and never clears it.
REMATFN_REVEAL(ThrowsOf, c10::StorageImpl::throw_on_immutable_data_ptr_)
#endif

// Only a write asks `refuse`; what reads gets null. What torch would have copied at a write (COW) has
// gone with the bytes. False where torch cannot tell a write from a read.
inline bool forbid_writes(c10::StorageImpl& storage, void (*refuse)(c10::StorageImpl*)) {
#if REMATFN_TORCH_AT_LEAST(13)
  storage.clear_materializer();
  storage.set_materializer(refuse);
  return true;
#else
  (void)storage;
  (void)refuse;
  return false;
#endif
}

// Takes both back, once the storage is given its bytes.
inline void allow_access(c10::StorageImpl& storage) {
#if REMATFN_TORCH_AT_LEAST(12)
  storage.clear_data_ptr_access_error_msg_();
#else
  storage.*reveal(ThrowsOf()) = false;
#endif
#if REMATFN_TORCH_AT_LEAST(13)
  storage.clear_materializer();
#endif
}

// In which capture a stream is; 0: in none. CUDA's runtime tells them apart. Of other devices nobody could ask
// until 2.13, and since then whether there is one: kSomeCapture.
inline constexpr std::uint64_t kSomeCapture = 1;
inline std::uint64_t capture_of(const c10::impl::DeviceGuardImplInterface& guard, const c10::Stream& stream) {
  if (stream.device_type() == c10::kCUDA) {
    // Before CUDA 13 there are three arguments, and the others are not looked at.
    using Ask = int (*)(void* stream, int* status, unsigned long long* id, void*, void*, void*, void*);
    static const auto ask = reinterpret_cast<Ask>(dlsym(RTLD_DEFAULT, "cudaStreamGetCaptureInfo"));
    int status = 0;
    unsigned long long id = 0;
    if (ask != nullptr && ask(guard.getStreamNativeHandle(stream), &status, &id, nullptr, nullptr, nullptr, nullptr) == 0) {
      return status == 0 ? 0 : id + kSomeCapture + 1;
    }
  }
#if REMATFN_TORCH_AT_LEAST(13)
  return guard.isStreamCapturing(stream) ? kSomeCapture : 0;
#else
  return 0;
#endif
}

// Owned by whoever calls an operator with arguments that nobody else holds. Where an operator returns
// several of its arguments (`sort.values`), 2.11 drops them from the stack before it reads them:
// https://github.com/pytorch/pytorch/pull/174807.
class HeldArguments {
 public:
#if REMATFN_TORCH_AT_LEAST(12)
  HeldArguments(const c10::OperatorHandle& /*op*/, const torch::jit::Stack& /*stack*/) {}
#else
  HeldArguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
    const c10::FunctionSchema& schema = op.schema();
    if (schema.returns().size() < 2) return;
    held_ = torch::jit::last(stack, schema.arguments().size()).vec();
  }

 private:
  std::vector<c10::IValue> held_;
#endif
};

// A slot of our own in the state of a thread that torch hands on to the backwards begun there. Slots were
// numbered until 2.12.
inline constexpr std::string_view kOwnSlot = "REMATFN_LEVEL";
template <class Kind = c10::DebugInfoKind>
Kind own_slot() {
  if constexpr (std::is_enum_v<Kind>) {
    return static_cast<Kind>(0x72);
  } else {
    return Kind(&kOwnSlot);
  }
}

// Nodes were held by shared_ptr until 2.12.
template <class N>
auto make_node() {
  using Held = decltype(torch::autograd::Edge::function);
  if constexpr (std::is_same_v<Held, std::shared_ptr<torch::autograd::Node>>) {
    return Held(std::make_shared<N>());
  } else {
    return Held(c10::make_intrusive<N>());
  }
}

}  // namespace rematfn
