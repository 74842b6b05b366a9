// SPDX-License-Identifier: Apache-2.0
#include "run_operator.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/resize_native.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "elsewhere.h"
#include "generator.h"
#include "stream.h"

namespace fake {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

// What interprets operators above the backends; a call from here must not go through it again.
const DispatchKeySet kAbove = (DispatchKeySet(DispatchKeySet::FULL) -
                               DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::Python)) -
                              DispatchKeySet({DispatchKey::Conjugate, DispatchKey::Negative,
                                              DispatchKey::ZeroTensor});

// Names live as long as the process.
const char* name_of(const c10::OperatorHandle& op) { return op.schema().name().c_str(); }

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op),
        schema_(op.schema()),
        stack_(*stack),
        arguments_(stack->end() - static_cast<std::ptrdiff_t>(schema_.arguments().size()),
                   stack->end()) {}

  void run() {
    settle_host_tensors();
    if (returns_view()) return make_view();
    draw();
    Stack results;
    if (!infer(results)) return run_at_once();
    allocate(results);
    enqueue(results);
    finish(std::move(results));
  }

 private:
  // The host may write its tensors, or free them, before the kernel runs.
  void settle_host_tensors() {
    for (std::size_t i = 0; i < arguments_.size(); ++i) {
      for_each_tensor(arguments_[i], [&](const at::Tensor& t) {
        TORCH_CHECK(!t.defined() || is_ours(t) || t.dim() == 0 ||
                        arguments_[i].isOptionalTensorList(),
                    name_of(op_), ": expected all tensors on ", c10::Device(kFake, 0),
                    ", but `", schema_.arguments()[i].name(), "` is on ", t.device());
      });
      if (arguments_[i].isTensor() && arguments_[i].toTensor().defined() &&
          arguments_[i].toTensor().is_cpu()) {
        const at::Tensor& number = arguments_[i].toTensor();
        at::Tensor copy = number.clone();
        if (number.unsafeGetTensorImpl()->is_wrapped_number()) {
          copy.unsafeGetTensorImpl()->set_wrapped_number(true);
        }
        arguments_[i] = copy;
      } else if (arguments_[i].isOptionalTensorList()) {  // indices
        c10::List<std::optional<at::Tensor>> list;
        for (const auto& t : arguments_[i].toOptionalTensorVector()) {
          list.push_back(t && t->defined() && !is_ours(*t) ? std::optional(t->clone()) : t);
        }
        arguments_[i] = list;
      }
    }
  }

  bool is_written(std::size_t argument) const {
    const c10::AliasInfo* alias = schema_.arguments()[argument].alias_info();
    return alias != nullptr && alias->isWrite();
  }

  bool returns_view() const {
    const auto& returns = schema_.returns();
    return std::any_of(returns.begin(), returns.end(), [](const c10::Argument& r) {
      return r.alias_info() != nullptr && !r.alias_info()->isWrite();
    });
  }

  // A view reads no bytes: the CPU's kernel says at once what it looks like.
  void make_view() {
    const c10::impl::ExcludeDispatchKeyGuard below(kAbove);
    Elsewhere cpu(DispatchKey::CPU, /*with_bytes=*/false);
    Stack stack = converted(cpu, arguments_);
    op_.callBoxed(&stack);
    const at::Tensor& self = arguments_[0].toTensor();
    const auto view_of = [&](const at::Tensor& seen) {
      const c10::Storage* storage = cpu.original_of(seen);
      TORCH_CHECK(storage != nullptr, name_of(op_), ": the result is not a view");
      auto view = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(*storage), self.key_set(), seen.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(seen.sizes(), seen.strides(),
                                                        seen.storage_offset());
      return view;
    };
    for (IValue& result : stack) {
      if (result.isTensorList()) {
        c10::List<at::Tensor> views;
        for (const at::Tensor& t : result.toTensorVector()) views.push_back(view_of(t));
        result = views;
      } else {
        result = view_of(result.toTensor());
      }
    }
    finish(std::move(stack));
  }

  // Random operators draw from a generator of the CPU that nobody else has.
  void draw() {
    bool has_generator = false;
    for (std::size_t i = 0; i < arguments_.size(); ++i) {
      if (schema_.arguments()[i].name() != "generator") continue;
      has_generator = true;
      at::Generator generator =
          arguments_[i].isNone() ? default_generator() : arguments_[i].toGenerator();
      TORCH_CHECK(generator.device().type() == kFake, name_of(op_),
                  ": expected a generator of the fake device, not of ", generator.device());
      const std::lock_guard lock(generator.mutex());
      arguments_[i] = generator.get<Generator>()->next();
    }
    TORCH_CHECK(has_generator || !op_.hasTag(at::Tag::nondeterministic_seeded), name_of(op_),
                " draws from a generator that cannot be told");
  }

  // Fills in the results as meta tensors; false if they cannot be foreseen.
  bool infer(Stack& results) {
    for (const c10::Argument& r : schema_.returns()) {
      const bool has_tensors = r.type()->isSubtypeOf(*c10::TensorType::get()) ||
                               r.type()->isSubtypeOf(*c10::ListType::ofTensors());
      if (!has_tensors) return false;
    }
    const c10::impl::ExcludeDispatchKeyGuard below(kAbove);
    Elsewhere meta(DispatchKey::Meta);
    Stack stack = converted(meta, arguments_);
    const Stack given = stack;
    try {
      op_.callBoxed(&stack);
    } catch (const std::exception&) {
      return false;  // the CPU's kernel says what is wrong, if anything is
    }
    for (std::size_t i = 0; i < given.size(); ++i) {
      if (is_written(i)) resize(arguments_[i], given[i]);
    }
    results = std::move(stack);
    return true;
  }

  // `out=` tensors become as large as what comes out.
  static void resize(const IValue& argument, const IValue& as) {
    if (!argument.isTensor() || !argument.toTensor().defined()) return;
    const at::Tensor& tensor = argument.toTensor();
    if (tensor.sizes() == as.toTensor().sizes()) return;
    at::native::resize_(tensor, as.toTensor().sizes(), std::nullopt);
    if (tensor.strides() != as.toTensor().strides()) {
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(as.toTensor().sizes(),
                                                          as.toTensor().strides());
    }
  }

  // The argument that a result is, as far as the schema tells; or -1.
  std::ptrdiff_t argument_of(std::size_t result) const {
    const c10::AliasInfo* alias = schema_.returns()[result].alias_info();
    if (alias == nullptr) return -1;
    for (std::size_t i = 0; i < arguments_.size(); ++i) {
      const c10::AliasInfo* other = schema_.arguments()[i].alias_info();
      if (other != nullptr && other->beforeSets() == alias->beforeSets()) {
        return static_cast<std::ptrdiff_t>(i);
      }
    }
    return -1;
  }

  static at::Tensor allocated(const at::Tensor& like) {
    if (!like.defined()) return like;
    constexpr DispatchKeySet keys(DispatchKey::PrivateUse1);
    auto* allocator = c10::GetAllocator(kFake);
    if (!like.is_non_overlapping_and_dense()) {
      return at::detail::empty_generic(like.sizes(), allocator, keys, like.scalar_type(),
                                       std::nullopt);
    }
    return at::detail::empty_strided_generic(like.sizes(), like.strides(), allocator, keys,
                                             like.scalar_type());
  }

  void allocate(Stack& results) {
    for (std::size_t i = 0; i < results.size(); ++i) {
      if (const auto argument = argument_of(i); argument >= 0) {
        results[i] = arguments_[static_cast<std::size_t>(argument)];
      } else if (results[i].isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& t : results[i].toTensorVector()) list.push_back(allocated(t));
        results[i] = list;
      } else {
        results[i] = allocated(results[i].toTensor());
      }
    }
  }

  // See Note [A kernel of the CPU, in the stream's thread]
  void enqueue(const Stack& results) {
    Elsewhere cpu(DispatchKey::CPU);
    Stack inputs = converted(cpu, arguments_);
    std::vector<at::Tensor> fresh;
    for (std::size_t i = 0; i < results.size(); ++i) {
      if (argument_of(i) >= 0) continue;
      for_each_tensor(results[i], [&](const at::Tensor& t) { fresh.push_back(cpu.convert(t)); });
    }
    // `cpu` has our storages, which a stream must not keep.
    current_stream().enqueue(name_of(op_), [op = op_, inputs = std::move(inputs),
                                            fresh = std::move(fresh),
                                            skip = skipped_results()] {
      Stack results = inputs;
      op.callBoxed(&results);
      auto to = fresh.begin();
      for (std::size_t i = 0; i < results.size(); ++i) {
        if (skip[i]) continue;
        for_each_tensor(results[i], [&](const at::Tensor& made) {
          TORCH_CHECK(to != fresh.end() && made.defined() == to->defined() &&
                          (!made.defined() || made.sizes() == to->sizes()),
                      op.schema().name(), ": the shapes were not as foreseen");
          if (made.defined()) to->copy_(made);
          ++to;
        });
      }
    });
  }

  std::vector<bool> skipped_results() const {
    std::vector<bool> skip;
    for (std::size_t i = 0; i < schema_.returns().size(); ++i) skip.push_back(argument_of(i) >= 0);
    return skip;
  }

  // What cannot be foreseen.
  void run_at_once() {
    Stream& stream = current_stream();
    Stack results;
    {
      Elsewhere cpu(DispatchKey::CPU);
      results = converted(cpu, arguments_);
      stream.enqueue(name_of(op_), [&] { op_.callBoxed(&results); });
      stream.wait();
    }
    std::vector<std::pair<at::Tensor, at::Tensor>> copies;
    const auto on_device = [&](const at::Tensor& made) {
      at::Tensor ours = allocated(made);
      if (made.defined()) copies.emplace_back(Elsewhere(DispatchKey::CPU).convert(ours), made);
      return ours;
    };
    for (std::size_t i = 0; i < results.size(); ++i) {
      if (const auto argument = argument_of(i); argument >= 0) {
        resize(arguments_[static_cast<std::size_t>(argument)], results[i]);
        results[i] = arguments_[static_cast<std::size_t>(argument)];
      } else if (results[i].isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& t : results[i].toTensorVector()) list.push_back(on_device(t));
        results[i] = list;
      } else if (results[i].isTensor()) {
        results[i] = on_device(results[i].toTensor());
      }
    }
    stream.enqueue(name_of(op_), [copies = std::move(copies)] {
      for (const auto& [to, from] : copies) to.copy_(from);
    });
    finish(std::move(results));
  }

  void finish(Stack results) {
    torch::jit::drop(stack_, schema_.arguments().size());
    for (IValue& result : results) stack_.push_back(std::move(result));
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack& stack_;
  Stack arguments_;
};

}  // namespace

void run_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run();
}

}  // namespace fake
