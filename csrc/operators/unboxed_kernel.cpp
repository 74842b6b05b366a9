// SPDX-License-Identifier: Apache-2.0
#include "operators/unboxed_kernel.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

#include "operators/boxed_kernel.h"
#include "operators/invocation.h"
#include "tensors/dispatch_key.h"
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
    (end<Args>(*place(i++)), ...);
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
    } else {
      return value;
    }
  }
  template <class T>
  static void end(c10::IValue& value) {
    if constexpr (!std::is_same_v<std::decay_t<T>, at::Tensor>) value.~IValue();
  }
  c10::IValue* place(std::size_t i) { return reinterpret_cast<c10::IValue*>(memory_) + i; }

  alignas(c10::IValue) std::byte memory_[sizeof...(Args) * sizeof(c10::IValue)];
};

// ---- the kernel --------------------------------------------------------------------------------

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
      return std::move(boxed_result_).toTensor();
    }
  }

 private:
  // An operator that writes its first argument hands out that very reference.
  static constexpr bool kReturnsArgument = std::is_reference_v<Result>;

  void take(Result result) {
    if constexpr (kReturnsArgument) {
      results_ = arguments_.slice(0, 1);
    } else {
      boxed_result_ = std::move(result);
      results_ = c10::ArrayRef<c10::IValue>(boxed_result_);
    }
  }

  const Operator& operator_;
  std::tuple<Args...> args_;
  Borrowed<Args...> boxed_;
  c10::IValue boxed_result_;
};

template <class Signature>
class UnboxedKernel;

template <class Result, class... Args>
class UnboxedKernel<Result(Args...)> final : public c10::OperatorKernel {
 public:
  explicit UnboxedKernel(const c10::OperatorHandle& op)
      : operator_(op.typed<Result(Args...)>()), facts_(facts_of(op)) {}

  Result operator()(c10::DispatchKeySet keys, Args... args) {
    UnboxedInvocation<Result, Args...> invocation(operator_, keys, *facts_, args...);
    govern(invocation);
    return invocation.result();
  }

 private:
  const c10::TypedOperatorHandle<Result(Args...)> operator_;
  const std::shared_ptr<const OperatorFacts> facts_;
};

// ---- which operators ---------------------------------------------------------------------------

// Whether the dispatcher passes an argument, or a result, of this schema as a T.
template <class T>
bool is_passed_as(const c10::Argument& argument) {
  const c10::Type& type = *argument.real_type();
  const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  if constexpr (std::is_same_v<std::decay_t<T>, at::Tensor>) {
    constexpr bool may_write = std::is_same_v<T, at::Tensor&>;
    return type.kind() == c10::TypeKind::TensorType && written == may_write;
  } else if constexpr (std::is_same_v<std::decay_t<T>, at::Scalar>) {
    return type.kind() == c10::TypeKind::NumberType;
  } else if constexpr (std::is_same_v<T, bool>) {
    return type.kind() == c10::TypeKind::BoolType;
  } else if constexpr (std::is_same_v<T, std::int64_t>) {
    return type.kind() == c10::TypeKind::IntType;
  } else {
    static_assert(std::is_same_v<T, c10::SymIntArrayRef>);
    return type.kind() == c10::TypeKind::ListType &&
           type.containedType(0)->kind() == c10::TypeKind::SymIntType;
  }
}

template <class Result, class... Args>
bool has_signature(const c10::FunctionSchema& schema, Result (*)(Args...)) {
  if (schema.arguments().size() != sizeof...(Args) || schema.returns().size() != 1) return false;
  if (!is_passed_as<Result>(schema.returns()[0])) return false;
  std::size_t i = 0;
  if (!(is_passed_as<Args>(schema.arguments()[i++]) && ...)) return false;
  if constexpr (std::is_reference_v<Result>) {
    return schema.arguments()[0].alias_info() != nullptr;
  }
  return true;
}

template <class Signature>
bool make_if_of(const c10::OperatorHandle& op, std::optional<c10::KernelFunction>& kernel) {
  if (!has_signature(op.schema(), static_cast<Signature*>(nullptr))) return false;
  try {
    kernel = c10::KernelFunction::makeFromUnboxedFunctor<false, UnboxedKernel<Signature>>(
        std::make_unique<UnboxedKernel<Signature>>(op));
  } catch (const c10::Error&) {
    return false;  // its C++ signature is older than its schema
  }
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
                  Written(Written, S)>(op);         // fill_
}

}  // namespace rematfn
