// SPDX-License-Identifier: Apache-2.0
#include "operators/kernels_above.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <array>
#include <memory>
#include <optional>
#include <utility>

#include "levels/level.h"
#include "levels/refusals.h"
#include "operators/boxed_kernel.h"
#include "tensors/layers.h"
#include "tensors/stack_utils.h"

namespace rematfn {
namespace {

using c10::DispatchKey;
using torch::jit::Stack;

c10::ArrayRef<c10::IValue> arguments_of(const c10::OperatorHandle& op, const Stack& stack) {
  const std::size_t count = op.schema().arguments().size();
  return c10::ArrayRef<c10::IValue>(stack.data() + stack.size() - count, count);
}

// ---- holding -----------------------------------------------------------------------------------

// For a scope: level tensors that are read now stay resident, on this thread.
class HoldScope {
 public:
  HoldScope() : outer_(std::exchange(innermost_scope, this)) {}
  HoldScope(const HoldScope&) = delete;
  HoldScope& operator=(const HoldScope&) = delete;
  ~HoldScope() {
    innermost_scope = outer_;
    for (auto& [domain, version] : held_) {
      const DomainLock lock(domain);
      unpin(*version);
      version.reset();
    }
  }

  static HoldScope* current() { return innermost_scope; }

  // The domain's lock is held.
  void hold(const Ref<TensorVersion>& version) {
    pin(*version);
    held_.emplace_back(version->table->domain, version);
  }

  void hold(const at::Tensor& tensor, const c10::OperatorHandle& reader) {
    for_each_innermost(tensor, [&](const at::Tensor& inner) {
      const std::shared_ptr<Domain> domain = domain_of(*inner.unsafeGetTensorImpl());
      if (!domain) return;
      const DomainLock lock(domain);
      const Cell* cell = cell_of(*inner.unsafeGetTensorImpl());
      // Sealed by another thread, or from outside: always resident.
      if (cell == nullptr || !cell->version->table) return;
      Version* wanted = cell->version.get();
      materialize_for(level_of(*cell), wanted, "`" + reader.schema().name() + "`");
      hold(cell->version);
    });
  }

 private:
  static thread_local HoldScope* innermost_scope;

  HoldScope* const outer_;
  std::vector<std::pair<std::shared_ptr<Domain>, Ref<TensorVersion>>> held_;
};

thread_local HoldScope* HoldScope::innermost_scope = nullptr;

bool is_read(caffe2::TypeMeta dtype) {
  return c10::isIntegralType(c10::typeMetaToScalarType(dtype), /*includeBool=*/false);
}

// ---- kernels around torch's ---------------------------------------------------------------------

class Around : public c10::OperatorKernel {
 public:
  explicit Around(c10::SafeKernelFunction theirs) : theirs_(std::move(theirs)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    theirs_.callBoxed(op, keys, stack);
  }

 protected:
  const c10::SafeKernelFunction theirs_;
};

// Rule 1
class Governed final : public Around {
 public:
  using Around::Around;

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    govern(op, keys, stack, &theirs_);
  }
};

// Rule 2
class Holding final : public Around {
 public:
  using Around::Around;

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    HoldScope scope;
    for (const c10::IValue& value : arguments_of(op, *stack)) {
      for_each_tensor(value, [&](const at::Tensor& tensor, int) {
        if (is_read(tensor.dtype())) scope.hold(tensor, op);
      });
    }
    theirs_.callBoxed(op, keys, stack);
  }
};

// Rule 3
class MaxPool1d final : public Around {
 public:
  using Around::Around;

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const at::Tensor& self = arguments_of(op, *stack)[0].toTensor();
    const bool governed =
        current_level() != nullptr || domain_of(*self.unsafeGetTensorImpl()) != nullptr;
    if (governed && works_by_itself(self)) {
      govern(op, keys, stack);
    } else {
      theirs_.callBoxed(op, keys, stack);
    }
  }

 private:
  // What torch's kernel asks itself.
  static bool works_by_itself(const at::Tensor& self) {
    return self.is_cpu() && !(self.requires_grad() && at::GradMode::is_enabled()) &&
           !self._fw_grad(/*level=*/0).defined() && !at::isTensorSubclassLike(self);
  }
};

// ---- registration ------------------------------------------------------------------------------

template <class Kernel>
void put_around(const c10::OperatorHandle& op, DispatchKey key, Handles& handles) {
  auto kernel = std::make_unique<Kernel>(op.getComputedKernelForDispatchKey(key));
  handles.push_back(c10::Dispatcher::singleton().registerImpl(
      op.operator_name(), key, c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel)),
      std::nullopt, nullptr, "rematfn"));
}

// At all keys where an operator that decomposes does so for plain tensors: autograd's, and, where
// autograd is excluded, ours. That makes ours ambiguous to AutogradOther, which is hence the last.
template <class Kernel>
void put_around_decomposition(const char* name, const char* overload, Handles& handles) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!op.has_value()) return;
  for (const DispatchKey key : {DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA,
                                DispatchKey::AutogradOther, kLevelKey}) {
    put_around<Kernel>(*op, key, handles);
  }
}

// Torch warns of a kernel that takes another's place.
class Quiet final : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

constexpr std::array kKeysAbove{
    DispatchKey::MkldnnCPU,     DispatchKey::SparseCPU,       DispatchKey::SparseCUDA,
    DispatchKey::SparseCsrCPU,  DispatchKey::SparseCsrCUDA,   DispatchKey::NestedTensorCPU,
    DispatchKey::NestedTensorCUDA};

}  // namespace

void pin_kernel(const c10::OperatorHandle& op, DispatchKey key, Handles& handles) {
  put_around<Around>(op, key, handles);
}

void register_kernels_above(Handles& handles) {
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard no_warnings(&quiet);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op.has_value() || !op->hasSchema()) continue;
    for (const DispatchKey key : kKeysAbove) {
      if (op->hasKernelForDispatchKey(key)) put_around<Governed>(*op, key, handles);
    }
  }
  put_around_decomposition<MaxPool1d>("aten::max_pool1d", "", handles);
  const auto hold = [&](const char* name, const char* overload) {
    put_around_decomposition<Holding>(name, overload, handles);
  };
  hold("aten::tensor_split", "tensor_indices_or_sections");
  hold("aten::ctc_loss", "Tensor");
  hold("aten::lstm", "data");
  hold("aten::gru", "data");
  hold("aten::rnn_tanh", "data");
  hold("aten::rnn_relu", "data");
  hold("aten::_pad_packed_sequence", "");
  hold("aten::_pack_padded_sequence_backward", "");
}

void hold_if_asked(const Ref<TensorVersion>& version, caffe2::TypeMeta dtype) {
  HoldScope* scope = HoldScope::current();
  if (scope != nullptr && is_read(dtype)) scope->hold(version);
}

}  // namespace rematfn
