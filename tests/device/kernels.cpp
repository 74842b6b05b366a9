// SPDX-License-Identifier: Apache-2.0
//
// kernels.cpp: every operator, by the CPU's kernel.
//
// Note [A kernel of the CPU, in the stream's thread]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// The host must go on before the kernel has run, so it has to know the results' shapes: the operator is
// run on meta tensors, and memory is allocated for what comes out. The kernel is enqueued with CPU
// tensors that stand on the device's bytes. They own nothing, since nothing on a stream keeps memory
// alive. When the stream comes to it, the CPU's kernel runs, and its results are copied to
// where they belong. An operator that meta tensors cannot answer for, since its shapes or its results
// are numbers that depend on data, waits for the stream and runs at once.

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "generator.h"
#include "memory.h"
#include "stream.h"

namespace fake {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kFake;
}

// What interprets operators above the backends; a call from here must not go through it again.
const DispatchKeySet kAbove = (DispatchKeySet(DispatchKeySet::FULL) -
                               DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::Python)) -
                              DispatchKeySet({DispatchKey::Conjugate, DispatchKey::Negative,
                                              DispatchKey::ZeroTensor});

// Names live as long as the process.
const char* name_of(const c10::OperatorHandle& op) { return op.schema().name().c_str(); }

// ---- the arguments elsewhere ----------------------------------------------------------------------

// Arguments as tensors of another backend: CPU tensors on the same bytes (or on none, where only their
// shapes are asked for), or meta tensors. Tensors that share a storage share its counterpart.
class Elsewhere {
 public:
  explicit Elsewhere(DispatchKey backend, bool with_bytes = true)
      : backend_(backend), with_bytes_(with_bytes) {}

  at::Tensor convert(const at::Tensor& tensor) {
    if (!tensor.defined() || (!is_ours(tensor) && backend_ == DispatchKey::CPU)) return tensor;
    if (!is_ours(tensor) && tensor.dim() == 0) return tensor;  // a number
    DispatchKeySet keys(backend_);
    if (tensor.is_conj()) keys = keys.add(DispatchKey::Conjugate);
    if (tensor.is_neg()) keys = keys.add(DispatchKey::Negative);
    auto made = at::detail::make_tensor<c10::TensorImpl>(convert(tensor.storage()), keys,
                                                         tensor.dtype());
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    return made;
  }

  IValue convert(const IValue& value) {
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
      return c10::Device(backend_ == DispatchKey::CPU ? c10::kCPU : c10::kMeta);
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
    const bool on_cpu = backend_ == DispatchKey::CPU;
    void* bytes = on_cpu && with_bytes_ ? const_cast<void*>(storage.data()) : nullptr;
    c10::Storage made(c10::Storage::use_byte_size_t(), storage.nbytes(),
                      c10::DataPtr(bytes, on_cpu ? c10::kCPU : c10::kMeta),
                      on_cpu ? nullptr : c10::GetAllocator(c10::kMeta), /*resizable=*/!on_cpu);
    storages_.emplace_back(storage, made);
    return made;
  }

  DispatchKey backend_;
  bool with_bytes_;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;
};

Stack converted(Elsewhere& to, c10::ArrayRef<IValue> arguments) {
  Stack stack;
  for (const IValue& value : arguments) stack.push_back(to.convert(value));
  return stack;
}

template <typename F>
void for_each_tensor(const IValue& value, const F& f) {
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

// ---- one call -------------------------------------------------------------------------------------

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
                                            skip = skipped_results()]() mutable {
      op.callBoxed(&inputs);
      auto to = fresh.begin();
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        if (skip[i]) continue;
        for_each_tensor(inputs[i], [&](const at::Tensor& made) {
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

void run_operator(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

// ---- the operators that are about memory ------------------------------------------------------------

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
    pinned_memory().note_use(host.storage().data(), stream.id);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  device_memory().note_use(tensor.storage().data(), stream.id());
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
