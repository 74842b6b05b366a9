// SPDX-License-Identifier: Apache-2.0
#include "operators/kernels_above.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <utility>

#include "levels/level.h"
#include "levels/refusals.h"
#include "operators/boxed_kernel.h"
#include "operators/raw_access.h"
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

enum class Held : std::uint8_t { kIntegers, kAll };

// For a scope: level tensors that are read now stay resident, on this thread.
class HoldScope {
 public:
  explicit HoldScope(Held what) : what_(what), outer_(std::exchange(innermost_scope, this)) {}
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

  [[nodiscard]] bool wants(caffe2::TypeMeta dtype) const {
    return what_ == Held::kAll ||
           c10::isIntegralType(c10::typeMetaToScalarType(dtype), /*includeBool=*/false);
  }

  // The domain's lock is held.
  void hold(const Ref<TensorVersion>& version) {
    // It stays by itself, and may be written: a pinned version must not be.
    if (what_ == Held::kAll && version->raw) return;
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

  const Held what_;
  HoldScope* const outer_;
  std::vector<std::pair<std::shared_ptr<Domain>, Ref<TensorVersion>>> held_;
};

thread_local HoldScope* HoldScope::innermost_scope = nullptr;

// ---- kernels around torch's ---------------------------------------------------------------------

template <class Visit>
void for_each_argument(const c10::OperatorHandle& op, const Stack& stack, const Visit& visit) {
  for (const c10::IValue& value : arguments_of(op, stack)) {
    for_each_tensor(value, [&](const at::Tensor& tensor, int) { visit(tensor); });
  }
}

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
    // A part of another operator, as `to_padded_tensor` is of a nested `matmul`: what it makes is scratch.
    if (is_below_levels()) return Around::operator()(op, keys, stack);
    govern(op, keys, stack, &theirs_);
  }
};

// Rule 2
template <Held what>
class Holding final : public Around {
 public:
  using Around::Around;

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    HoldScope scope(what);
    for_each_argument(op, *stack, [&](const at::Tensor& tensor) {
      if (scope.wants(tensor.dtype())) scope.hold(tensor, op);
    });
    theirs_.callBoxed(op, keys, stack);
  }
};

// Rule 4
class KeepingBytes final : public Around {
 public:
  using Around::Around;

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    keep(arguments_of(op, *stack), op);
    HoldScope scope(Held::kAll);
    theirs_.callBoxed(op, keys, stack);
    keep(torch::jit::last(*stack, op.schema().returns().size()), op);
  }

 private:
  static void keep(c10::ArrayRef<c10::IValue> values, const c10::OperatorHandle& op) {
    std::vector<at::Tensor> tensors;
    for (const c10::IValue& value : values) {
      for_each_tensor(value, [&](const at::Tensor& tensor, int) { tensors.push_back(tensor); });
    }
    keep_bytes(tensors, "`" + op.schema().name() + "`", /*addressed=*/true);
  }
};

// Rule 3. `Otherwise`, if a derivative is wanted or somebody else interprets what it is made of.
template <class Otherwise>
class AsOne final : public Around {
 public:
  explicit AsOne(const c10::SafeKernelFunction& theirs) : Around(theirs), otherwise_(theirs) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    bool concerns_levels = current_level() != nullptr || op.schema().is_mutable();
    bool is_plain = true;
    for_each_argument(op, *stack, [&](const at::Tensor& tensor) {
      concerns_levels |= domain_of(*tensor.unsafeGetTensorImpl()) != nullptr;
      // What torch's kernel of max_pool1d asks itself.
      is_plain &= tensor.is_cpu() && !(tensor.requires_grad() && at::GradMode::is_enabled()) &&
                  !tensor._fw_grad(/*level=*/0).defined() && !at::isTensorSubclassLike(tensor);
    });
    if (concerns_levels && is_plain) {
      govern(op, keys, stack);
    } else {
      otherwise_(op, keys, stack);
    }
  }

 private:
  Otherwise otherwise_;
};

// At the key of meta tensors: there a kernel that works by address would follow a null pointer.
void refuse_shapes(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* /*stack*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(), " has no shape function");
}

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
void put_around_decomposition(const c10::OperatorName& name, Handles& handles) {
  const auto op = c10::Dispatcher::singleton().findSchema(name);
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

// See Note [Kernels above a level]
bool asks_for_metadata(const c10::OperatorName& name) {
  return name.name == "aten::_nested_tensor_size" || name.name == "aten::_nested_tensor_strides" ||
         name.name == "aten::_nested_tensor_storage_offsets";
}

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
    if (!op.has_value() || !op->hasSchema() || asks_for_metadata(name)) continue;
    for (const DispatchKey key : kKeysAbove) {
      if (op->hasKernelForDispatchKey(key)) put_around<Governed>(*op, key, handles);
    }
  }
  const auto put = [&]<class Kernel>(std::initializer_list<c10::OperatorName> names) {
    for (const c10::OperatorName& name : names) put_around_decomposition<Kernel>(name, handles);
  };
  put.operator()<Holding<Held::kIntegers>>({
      {"aten::tensor_split", "tensor_indices_or_sections"},
      {"aten::ctc_loss", "Tensor"},
      {"aten::lstm", "data"},
      {"aten::gru", "data"},
      {"aten::rnn_tanh", "data"},
      {"aten::rnn_relu", "data"},
      {"aten::_pad_packed_sequence", ""},
      {"aten::_pack_padded_sequence_backward", ""},
      {"aten::sparse_coo_tensor", "indices_size"},
      {"aten::_sparse_coo_tensor_unsafe", ""},
      {"aten::_validate_sparse_coo_tensor_args", ""},
  });
  const auto put_by_address = [&]<class Kernel>(std::initializer_list<c10::OperatorName> names) {
    put.operator()<Kernel>(names);
    for (const c10::OperatorName& name : names) {
      handles.push_back(dispatcher.registerImpl(
          name, DispatchKey::Meta, c10::KernelFunction::makeFromBoxedFunction<&refuse_shapes>(),
          std::nullopt, nullptr, "rematfn"));
    }
  };
  put_by_address.operator()<AsOne<KeepingBytes>>({
      {"aten::_sobol_engine_draw", ""},
      {"aten::_sobol_engine_ff_", ""},
      {"aten::_sobol_engine_initialize_state_", ""},
      {"aten::_sobol_engine_scramble_", ""},
      {"aten::_rowwise_prune", ""},
      {"aten::_saturate_weight_to_fp16", ""},
      {"aten::choose_qparams_optimized", ""},
      {"aten::fbgemm_linear_int8_weight", ""},
      {"aten::fbgemm_linear_int8_weight_fp32_activation", ""},
      {"aten::fbgemm_linear_quantize_weight", ""},
  });
  put_by_address.operator()<AsOne<Holding<Held::kAll>>>({
      {"aten::fbgemm_linear_fp16_weight", ""},
      {"aten::fbgemm_linear_fp16_weight", "out"},
      {"aten::fbgemm_linear_fp16_weight_fp32_activation", ""},
      {"aten::fbgemm_linear_fp16_weight_fp32_activation", "out"},
  });
  put.operator()<AsOne<Around>>({{"aten::max_pool1d", ""}});
  put.operator()<KeepingBytes>({
      {"aten::fbgemm_pack_gemm_matrix_fp16", ""},
      {"aten::fbgemm_pack_quantized_matrix", ""},
      {"aten::fbgemm_pack_quantized_matrix", "KN"},
      {"aten::_wrapped_linear_prepack", ""},
  });
}

void hold_if_asked(const Ref<TensorVersion>& version, caffe2::TypeMeta dtype) {
  HoldScope* scope = HoldScope::current();
  if (scope != nullptr && scope->wants(dtype)) scope->hold(version);
}

}  // namespace rematfn
