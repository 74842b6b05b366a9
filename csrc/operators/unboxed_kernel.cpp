// SPDX-License-Identifier: Apache-2.0
//
// unboxed_kernel.cpp: the kernel that every operator passes, for those that come unboxed.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_log_softmax_backward_data_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_ops.h>
#include <ATen/ops/_to_copy_ops.h>
#include <ATen/ops/clone_ops.h>
#include <ATen/ops/convolution_backward_ops.h>
#include <ATen/ops/convolution_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/embedding_dense_backward_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/gelu_backward_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/mean_ops.h>
#include <ATen/ops/native_batch_norm_backward_ops.h>
#include <ATen/ops/native_batch_norm_ops.h>
#include <ATen/ops/native_layer_norm_backward_ops.h>
#include <ATen/ops/native_layer_norm_ops.h>
#include <ATen/ops/nll_loss_backward_ops.h>
#include <ATen/ops/nll_loss_forward_ops.h>
#include <ATen/ops/permute_ops.h>
#include <ATen/ops/select_backward_ops.h>
#include <ATen/ops/select_ops.h>
#include <ATen/ops/slice_backward_ops.h>
#include <ATen/ops/slice_ops.h>
#include <ATen/ops/zeros_like_ops.h>

#include <array>
#include <cstddef>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "operators/boxed_kernel.h"
#include "operators/invocation.h"
#include "tensors/dispatch_key.h"
#include "tensors/level_tensor.h"
#include "tensors/torch_layout.h"

namespace rematfn {
namespace {

// ---- arguments ---------------------------------------------------------------------------------

// IValues of arguments, which do not own a reference to tensors: these are never destroyed.
template <class... Args>
class Borrowed {
 public:
  explicit Borrowed(Args... args) {
    std::size_t i = 0;
    (new (place(i++)) c10::IValue(as_value(args)), ...);
  }
  ~Borrowed() {
    std::size_t i = 0;
    (end<std::decay_t<Args>>(*place(i++)), ...);
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  [[nodiscard]] c10::ArrayRef<c10::IValue> values() {
    return c10::ArrayRef<c10::IValue>(place(0), sizeof...(Args));
  }

 private:
  template <class T>
  static c10::IValue as_value(const T& value) {
    if constexpr (std::is_same_v<T, at::Tensor>) {
      return borrow(value);
    } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
      return value ? borrow(*value) : c10::IValue();
    } else {
      return value;
    }
  }
  template <class T>
  static void end(c10::IValue& value) {
    constexpr bool is_borrowed = std::is_same_v<T, at::Tensor> || std::is_same_v<T, std::optional<at::Tensor>>;
    if constexpr (!is_borrowed) value.~IValue();
  }
  c10::IValue* place(std::size_t i) { return reinterpret_cast<c10::IValue*>(memory_) + i; }

  alignas(c10::IValue) std::byte memory_[sizeof...(Args) * sizeof(c10::IValue)];
};

// ---- the kernel --------------------------------------------------------------------------------

// How many tensors a result is.
template <class Result>
constexpr std::size_t count_of(std::type_identity<Result> /*of*/) {
  return 1;
}
template <class... Tensors>
constexpr std::size_t count_of(std::type_identity<std::tuple<Tensors...>> /*of*/) {
  return sizeof...(Tensors);
}

template <class Result, class... Args>
class UnboxedInvocation final : public Invocation {
 public:
  using Operator = c10::TypedOperatorHandle<Result(Args...)>;

  UnboxedInvocation(const Operator& op, c10::DispatchKeySet keys, const OperatorFacts& facts,
                    Args... args)
      : Invocation(op, keys, facts), operator_(op), args_(args...), boxed_(args...) {
    arguments_ = boxed_.values();
  }

  void run_below() override {
    const c10::DispatchKeySet below = keys & kBelowLevels;
    take(std::apply([&](Args... args) -> Result { return operator_.redispatch(below, args...); },
                    args_));
  }
  void call_again() override {
    const c10::impl::ForceDispatchKeyGuard anew(keys_to_begin_anew());
    take(std::apply([&](Args... args) -> Result { return operator_.call(args...); }, args_));
  }

  Result result() {
    if constexpr (kReturnsArgument) {
      return std::get<0>(args_);
    } else {
      return give(std::type_identity<Result>());
    }
  }

 private:
  // An operator that writes its first argument hands out that very reference.
  static constexpr bool kReturnsArgument = std::is_reference_v<Result>;

  void take(Result result) {
    if constexpr (kReturnsArgument) {
      results_ = arguments_.slice(0, 1);
    } else {
      keep(std::move(result));
      results_ = boxed_results_;
    }
  }
  void keep(at::Tensor result) { boxed_results_[0] = std::move(result); }
  template <class... Tensors>
  void keep(std::tuple<Tensors...> result) {
    std::apply([&](Tensors&... each) { boxed_results_ = {std::move(each)...}; }, result);
  }
  at::Tensor give(std::type_identity<at::Tensor> /*as*/) { return std::move(boxed_results_[0]).toTensor(); }
  template <class... Tensors>
  std::tuple<Tensors...> give(std::type_identity<std::tuple<Tensors...>> /*as*/) {
    return std::apply([](auto&... each) { return std::tuple<Tensors...>(std::move(each).toTensor()...); },
                      boxed_results_);
  }

  const Operator& operator_;
  std::tuple<Args...> args_;
  Borrowed<Args...> boxed_;
  std::array<c10::IValue, count_of(std::type_identity<Result>())> boxed_results_;
};

// Whether it makes a tensor of a tensor and what is none.
template <class Result, class First, class... Rest>
constexpr bool may_be_view(Result (*)(First, Rest...)) {
  return std::is_same_v<Result, at::Tensor> && std::is_same_v<First, const at::Tensor&> &&
         (!std::is_convertible_v<Rest, std::optional<at::Tensor>> && ...);
}

template <class Signature>
class UnboxedKernel;

template <class Result, class... Args>
class UnboxedKernel<Result(Args...)> final : public c10::OperatorKernel {
 public:
  explicit UnboxedKernel(const c10::OperatorHandle& op)
      : operator_(op.typed<Result(Args...)>()), facts_(facts_of(op)) {}

  Result operator()(c10::DispatchKeySet keys, Args... args) {
    if constexpr (may_be_view(static_cast<Result (*)(Args...)>(nullptr))) {
      const at::Tensor& base = std::get<0>(std::forward_as_tuple(args...));
      if (facts_->is_plain_view && base.defined() && is_plain(*base.unsafeGetTensorImpl())) {
        return govern_view(base, [&] { return operator_.redispatch(keys & kBelowLevels, args...); });
      }
    }
    UnboxedInvocation<Result, Args...> invocation(operator_, keys, *facts_, args...);
    govern(invocation);
    return invocation.result();
  }

 private:
  const c10::TypedOperatorHandle<Result(Args...)> operator_;
  const std::shared_ptr<const OperatorFacts> facts_;
};

// ---- which operators ---------------------------------------------------------------------------

template <class Signature>
bool make_if_of(const c10::OperatorHandle& op, std::optional<c10::KernelFunction>& kernel) {
  if (!has_signature<Signature>(op)) return false;
  kernel = c10::KernelFunction::makeFromUnboxedFunctor<false, UnboxedKernel<Signature>>(
      std::make_unique<UnboxedKernel<Signature>>(op));
  return true;
}

template <class... Signatures>
std::optional<c10::KernelFunction> first_of(const c10::OperatorHandle& op) {
  std::optional<c10::KernelFunction> kernel;
  (make_if_of<Signatures>(op, kernel) || ...);
  return kernel;
}

}  // namespace

std::optional<c10::KernelFunction> unboxed_kernel_for(const c10::OperatorHandle& op) {
  using T = const at::Tensor&;
  using S = const at::Scalar&;
  using Written = at::Tensor&;
  using Int = std::int64_t;
  using Sizes = c10::SymIntArrayRef;
  using namespace at::_ops;
  if (!op.schema().name().starts_with("aten::") || facts_of(op)->selects_backend) return {};
  return first_of<at::Tensor(T),                    // sin
                  at::Tensor(T, T),                 // mul, mm
                  at::Tensor(T, T, T),              // where, lerp
                  at::Tensor(T, S),                 // pow
                  at::Tensor(T, T, S),              // add
                  at::Tensor(T, T, T, S, S),        // addmm
                  at::Tensor(T, Int),               // unsqueeze
                  at::Tensor(T, Int, Int),          // transpose
                  at::Tensor(T, Int, bool),         // softmax
                  at::Tensor(T, Sizes),             // view
                  at::Tensor(T, Sizes, bool),       // expand
                  Written(Written),                 // exp_
                  Written(Written, T),              // mul_
                  Written(Written, T, S),           // add_
                  Written(Written, S),              // fill_
                  // Those of networks that have signatures of their own.
                  _log_softmax_backward_data::schema, _scaled_dot_product_flash_attention_for_cpu::schema,
                  _to_copy::schema, clone::schema, convolution::schema, convolution_backward::schema,
                  copy_::schema, embedding::schema, embedding_dense_backward::schema, gelu::schema,
                  gelu_backward::schema, mean_dim::schema, native_batch_norm::schema,
                  native_batch_norm_backward::schema, native_layer_norm::schema,
                  native_layer_norm_backward::schema, nll_loss_backward::schema, nll_loss_forward::schema,
                  permute::schema, select_int::schema, select_backward::schema, slice_Tensor::schema,
                  slice_backward::schema, zeros_like::schema>(op);
}

}  // namespace rematfn
