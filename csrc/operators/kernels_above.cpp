// SPDX-License-Identifier: Apache-2.0
#include "operators/kernels_above.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>

#include "levels/level.h"
#include "levels/refusals.h"
#include "operators/boxed_kernel.h"
#include "operators/raw_access.h"
#include "tensors/layers.h"
#include "tensors/stack_utils.h"
#include "tensors/thread_keys.h"

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

class HoldScope;
thread_local HoldScope* innermost_scope = nullptr;

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
      with_cell(inner, [&](Cell& cell) {
        if (!cell.version->table) return;  // from outside: always resident
        Version* wanted = cell.version.get();
        materialize_for(level_of(cell), wanted, "`" + reader.schema().name() + "`");
        hold(cell.version);
      });
    });
  }

 private:
  const Held what_;
  HoldScope* const outer_;
  std::vector<std::pair<std::shared_ptr<Domain>, Ref<TensorVersion>>> held_;
};

// ---- kernels around torch's ---------------------------------------------------------------------

using Theirs = const c10::SafeKernelFunction&;
using Operator = const c10::OperatorHandle&;

class Around final : public c10::OperatorKernel {
 public:
  Around(c10::SafeKernelFunction theirs, KernelAround ours)
      : theirs_(std::move(theirs)), ours_(ours) {}

  void operator()(Operator op, c10::DispatchKeySet keys, Stack* stack) {
    ours_(theirs_, op, keys, stack);
  }

 private:
  const c10::SafeKernelFunction theirs_;
  const KernelAround ours_;
};

// Rule 1
void govern_theirs(Theirs theirs, Operator op, c10::DispatchKeySet keys, Stack* stack) {
  // A part of another operator, as `to_padded_tensor` is of a nested `matmul`: what it makes is scratch.
  if (is_below_levels()) return theirs.callBoxed(op, keys, stack);
  govern(op, keys, stack, &theirs);
}

// Rule 2
void hold_integers(Theirs theirs, Operator op, c10::DispatchKeySet keys, Stack* stack) {
  HoldScope scope(Held::kIntegers);
  for (const at::Tensor& tensor : tensors_in(arguments_of(op, *stack))) {
    if (scope.wants(tensor.dtype())) scope.hold(tensor, op);
  }
  theirs.callBoxed(op, keys, stack);
}

// See Note [What is asked before bytes are read]
void bring_back(Theirs theirs, Operator op, c10::DispatchKeySet keys, Stack* stack) {
  materialize({torch::jit::peek(*stack, 0, 1).toTensor()}, "materialize(x)");
  theirs.callBoxed(op, keys, stack);
}

// See Note [What is asked before bytes are read]
void find_size_below(Theirs theirs, Operator op, c10::DispatchKeySet keys, Stack* stack) {
  const c10::ArrayRef<c10::IValue> arguments = arguments_of(op, *stack);
  const at::Tensor& indices = arguments[0].toTensor();
  if (!is_intercepting() && domain_of(*indices.unsafeGetTensorImpl()) == nullptr) {
    return theirs.callBoxed(op, keys, stack);
  }
  materialize({indices}, "materialize(x)");
  c10::IValue size;
  {
    const BelowLevels below;
    const at::NoGradGuard no_graph;
    Stack made = arguments.vec();
    theirs.callBoxed(op, keys, &made);
    size = c10::IValue(made.back().toTensor().sizes());
  }
  stack->insert(stack->end() - arguments.size() + 2, std::move(size));  // (indices, values, size, ...)
  const auto with_size =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::sparse_coo_tensor", "indices_size");
  with_size.callBoxed(stack);
}

// Rule 4
void keep(Theirs theirs, Operator op, c10::DispatchKeySet keys, Stack* stack) {
  const std::string name = "`" + op.schema().name() + "`";
  keep_bytes(tensors_in(arguments_of(op, *stack)), name, /*addressed=*/true);
  HoldScope scope(Held::kAll);
  theirs.callBoxed(op, keys, stack);
  const auto results = torch::jit::last(*stack, op.schema().returns().size());
  keep_bytes(tensors_in(results), name, /*addressed=*/true);
}

// Rule 3. `otherwise`, if a derivative is wanted or somebody else interprets what it is made of.
template <KernelAround otherwise>
void govern_as_one(Theirs theirs, Operator op, c10::DispatchKeySet keys, Stack* stack) {
  bool concerns_levels = current_level() != nullptr || op.schema().is_mutable();
  bool is_plain = true;
  for (const at::Tensor& tensor : tensors_in(arguments_of(op, *stack))) {
    concerns_levels |= domain_of(*tensor.unsafeGetTensorImpl()) != nullptr;
    // What torch's kernel of max_pool1d asks itself.
    is_plain &= tensor.is_cpu() && !(tensor.requires_grad() && at::GradMode::is_enabled()) &&
                !tensor._fw_grad(/*level=*/0).defined() && !at::isTensorSubclassLike(tensor);
  }
  if (concerns_levels && is_plain) {
    govern(op, keys, stack);
  } else {
    otherwise(theirs, op, keys, stack);
  }
}

// At the key of meta tensors: there a kernel that works by address would follow a null pointer.
void refuse_shapes(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* /*stack*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(), " has no shape function");
}

// ---- registration ------------------------------------------------------------------------------

// At all keys where an operator that decomposes does so for plain tensors: autograd's, and, where
// autograd is excluded, ours. Ours makes AutogradOther ambiguous, which is hence done before.
void put_around_decomposition(const c10::OperatorName& name, KernelAround kernel) {
  const auto op = c10::Dispatcher::singleton().findSchema(name);
  if (!op.has_value()) return;
  for (const DispatchKey key : {DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA,
                                DispatchKey::AutogradOther, kLevelKey}) {
    put_around(*op, key, kernel);
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

void put_around(Operator op, DispatchKey key, KernelAround kernel) {
  auto around = std::make_unique<Around>(op.getComputedKernelForDispatchKey(key), kernel);
  register_kernel(op.operator_name(), key,
                  c10::KernelFunction::makeFromBoxedFunctor(std::move(around)));
}

void run_theirs(Theirs theirs, Operator op, c10::DispatchKeySet keys, Stack* stack) {
  theirs.callBoxed(op, keys, stack);
}

void register_kernels_above() {
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard no_warnings(&quiet);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op.has_value() || !op->hasSchema() || asks_for_metadata(name)) continue;
    for (const DispatchKey key : kKeysAbove) {
      if (op->hasKernelForDispatchKey(key)) put_around(*op, key, &govern_theirs);
    }
  }
  using Names = std::initializer_list<c10::OperatorName>;
  const auto put = [](KernelAround kernel, Names names) {
    for (const c10::OperatorName& name : names) put_around_decomposition(name, kernel);
  };
  put(&bring_back, {{"aten::resolve_conj", ""}, {"aten::resolve_neg", ""}});
  put(&find_size_below, {{"aten::sparse_coo_tensor", "indices"}});
  put(&hold_integers, {
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
  const auto put_by_address = [&](KernelAround kernel, Names names) {
    put(kernel, names);
    for (const c10::OperatorName& name : names) {
      register_kernel(name, DispatchKey::Meta,
                      c10::KernelFunction::makeFromBoxedFunction<&refuse_shapes>());
    }
  };
  put_by_address(&govern_as_one<&keep>, {
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
      {"aten::fbgemm_linear_fp16_weight", ""},
      {"aten::fbgemm_linear_fp16_weight", "out"},
      {"aten::fbgemm_linear_fp16_weight_fp32_activation", ""},
      {"aten::fbgemm_linear_fp16_weight_fp32_activation", "out"},
  });
  put(&govern_as_one<&run_theirs>, {{"aten::max_pool1d", ""}});
  put(&keep, {
      {"aten::fbgemm_pack_gemm_matrix_fp16", ""},
      {"aten::fbgemm_pack_quantized_matrix", ""},
      {"aten::fbgemm_pack_quantized_matrix", "KN"},
      {"aten::_wrapped_linear_prepack", ""},
  });
}

void hold_if_asked(const Ref<TensorVersion>& version, caffe2::TypeMeta dtype) {
  if (innermost_scope != nullptr && innermost_scope->wants(dtype)) [[unlikely]] innermost_scope->hold(version);
}

}  // namespace rematfn
