// SPDX-License-Identifier: Apache-2.0
#include "operators/call_template.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "tensors/stack_utils.h"

namespace rematfn {
namespace {

// Whether two plain arguments are the same to a kernel. What is rare may be found to differ.
bool are_same(const c10::IValue& a, const c10::IValue& b) {
  if (a.isInt()) return b.isInt() && a.toInt() == b.toInt();
  if (a.isNone()) return b.isNone();
  if (a.isBool()) return b.isBool() && a.toBool() == b.toBool();
  if (a.isDouble()) {  // bit by bit: a zero has a sign
    return b.isDouble() &&
           std::bit_cast<std::uint64_t>(a.toDouble()) == std::bit_cast<std::uint64_t>(b.toDouble());
  }
  if (a.isString()) return b.isString() && a.toStringRef() == b.toStringRef();
  if (a.isDevice()) return b.isDevice() && a.toDevice() == b.toDevice();
  if (a.isList()) {
    if (!b.isList()) return false;
    const c10::ArrayRef<c10::IValue> in_a = a.toListRef();
    const c10::ArrayRef<c10::IValue> in_b = b.toListRef();
    return std::equal(in_a.begin(), in_a.end(), in_b.begin(), in_b.end(),
                      [](const c10::IValue& x, const c10::IValue& y) { return are_same(x, y); });
  }
  return a.is(b);
}

// With the same tensors found in both, in the same places.
bool have_same_places(const c10::IValue& now, const c10::IValue& then) {
  if (now.isTensor()) return then.isTensor();
  if (is_tensor_list(now)) {
    return is_tensor_list(then) && now.toListRef().size() == then.toListRef().size();
  }
  return are_same(now, then);
}

// See Note [Replay restores what a kernel can see]. Elements of lists are not compared: there may be many.
std::int32_t first_that_is(const FoundTensors& found, std::size_t i) {
  if (found[i].index >= 0) return -1;
  for (std::size_t k = 0; k < i; ++k) {
    if (found[k].tensor == found[i].tensor && found[k].index < 0) return static_cast<std::int32_t>(k);
  }
  return -1;
}

c10::DispatchKeySet keys_without_ours(const c10::TensorImpl& tensor) {
  return keys_of(tensor) - kLevelKeySet;
}

}  // namespace

CallTemplate::CallTemplate(const Invocation& invocation, const FoundTensors& found)
    : op(invocation.op),
      keys(invocation.keys),
      selects_backend(invocation.facts.selects_backend),
      reads_shapes_only(invocation.facts.reads_shapes_only),
      grad_mode(c10::GradMode::is_enabled()),
      settings(Settings::present()),
      footprint_key(footprint_key_of(invocation.op, invocation.arguments())) {
  take_arguments(invocation.arguments());
  tensors.reserve(found.size());
  for (std::size_t i = 0; i < found.size(); ++i) take_tensor(found[i], first_that_is(found, i));
}

CallTemplate::CallTemplate(const CallTemplate& like)
    : op(like.op),
      keys(like.keys),
      selects_backend(like.selects_backend),
      reads_shapes_only(like.reads_shapes_only),
      grad_mode(like.grad_mode),
      settings(Settings::present()),
      footprint_key(like.footprint_key),
      arguments(like.arguments),
      tensors(like.tensors),
      geometry(like.geometry) {}

// See Note [A recorded call holds no tensors]
void CallTemplate::take_arguments(c10::ArrayRef<c10::IValue> from) {
  arguments.reserve(from.size());
  for (const c10::IValue& value : from) {
    const bool is_found = value.isTensor() && value.toTensor().defined();
    if (!is_found) compared_.push_back(static_cast<std::uint16_t>(arguments.size()));
    if (value.isTensor()) {
      arguments.emplace_back(at::Tensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      list.resize(value.toListRef().size());
      arguments.emplace_back(std::move(list));
    } else if (is_tensor_list(value)) {
      c10::List<std::optional<at::Tensor>> list;
      list.resize(value.toListRef().size());
      arguments.emplace_back(std::move(list));
    } else if (value.isList()) {
      arguments.emplace_back(value.toList().copy());  // TorchScript's are the program's own, to be changed
    } else {
      arguments.push_back(value);
    }
  }
}

void CallTemplate::take_tensor(const FoundTensor& found, std::int32_t same_as) {
  const c10::TensorImpl& tensor = *found.tensor;
  TensorArgument& argument = tensors.emplace_back();
  argument.keys = keys_without_ours(tensor);
  argument.offset = tensor.storage_offset();
  argument.storage_bytes = found.storage->nbytes();
  argument.geometry = static_cast<std::uint32_t>(geometry.size());
  argument.dimensions = static_cast<std::uint32_t>(tensor.dim());
  argument.index = found.index;
  argument.same_as = same_as;
  argument.position = found.position;
  argument.dtype = tensor.dtype();
  argument.wrapped_number = tensor.is_wrapped_number();
  argument.written = found.written;
  const c10::IntArrayRef sizes = tensor.sizes();
  const c10::IntArrayRef strides = tensor.strides();
  geometry.append(sizes.begin(), sizes.end());
  geometry.append(strides.begin(), strides.end());
}

bool CallTemplate::fits(const Invocation& invocation, const FoundTensors& found,
                        const Settings& now) const {
  if (keys != invocation.keys || tensors.size() != found.size() || &settings != &now ||
      grad_mode != c10::GradMode::is_enabled()) [[unlikely]] {
    return false;
  }
  const std::int64_t* place = geometry.data();
  for (std::size_t i = 0; i < found.size(); ++i) {
    const FoundTensor& f = found[i];
    const c10::TensorImpl& tensor = *f.tensor;
    const TensorArgument& then = tensors[i];
    const c10::IntArrayRef sizes = tensor.sizes();
    if (sizes.size() != then.dimensions || keys_without_ours(tensor) != then.keys ||
        f.position != then.position || f.index != then.index || f.written != then.written ||
        tensor.dtype() != then.dtype || tensor.storage_offset() != then.offset ||
        f.storage->nbytes() != then.storage_bytes ||
        tensor.is_wrapped_number() != then.wrapped_number || first_that_is(found, i) != then.same_as) {
      return false;
    }
    for (const std::int64_t size : sizes) {
      if (size != *place++) return false;
    }
    for (const std::int64_t stride : tensor.strides()) {
      if (stride != *place++) return false;
    }
  }
  const c10::ArrayRef<c10::IValue> values = invocation.arguments();
  return std::all_of(compared_.begin(), compared_.end(), [&](std::uint16_t i) {
    return have_same_places(values[i], arguments[i]);
  });
}

at::Tensor CallTemplate::over(const c10::Storage& storage, const TensorArgument& argument) const {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), argument.keys,
                                                         argument.dtype);
  auto* impl = tensor.unsafeGetTensorImpl();
  const std::int64_t* sizes = geometry.data() + argument.geometry;
  impl->set_sizes_and_strides({sizes, argument.dimensions},
                              {sizes + argument.dimensions, argument.dimensions}, argument.offset);
  if (argument.wrapped_number) impl->set_wrapped_number(true);
  return tensor;
}

View CallTemplate::view(std::size_t i) const {
  const TensorArgument& argument = tensors[i];
  const std::int64_t* sizes = geometry.data() + argument.geometry;
  return {argument.offset,
          {sizes, argument.dimensions},
          {sizes + argument.dimensions, argument.dimensions},
          argument.dtype.itemsize()};
}

namespace {

constexpr std::size_t kMostOfAnOperator = 16;
constexpr std::size_t kMostUnused = 8;

// What domains have left behind.
struct Unused {
  std::mutex mutex;
  std::vector<std::unique_ptr<CallTemplates>> templates;
};
Unused& unused = *new Unused;  // outlives the tensors of a dying process

// Those of a domain, for as long as it lives. In a forked child another thread's lock may be held for good.
struct Lent {
  Lent() {
    const std::unique_lock lock(unused.mutex, std::try_to_lock);
    if (!lock || unused.templates.empty()) return;
    templates = std::move(unused.templates.back());
    unused.templates.pop_back();
  }
  ~Lent() {
    const std::unique_lock lock(unused.mutex, std::try_to_lock);
    if (lock && unused.templates.size() < kMostUnused) unused.templates.push_back(std::move(templates));
  }

  std::unique_ptr<CallTemplates> templates = std::make_unique<CallTemplates>();
};

// A generator, a process group: it is not to be kept alive.
bool holds_object(const CallTemplate& made) {
  return std::ranges::any_of(made.arguments, [](const c10::IValue& v) {
    return v.isGenerator() || v.isObject() || v.isPyObject() || v.isCapsule();
  });
}

}  // namespace

CallTemplates& CallTemplates::of(TensorDomain& domain) {
  if (!domain.call_templates) domain.call_templates = std::make_shared<Lent>();
  return *static_cast<Lent*>(domain.call_templates.get())->templates;
}

Ref<CallTemplate> CallTemplates::of(const Invocation& invocation, const FoundTensors& found) {
  // See Note [Operators are known by an address]
  if (const std::uint64_t current = operator_generation(); current != generation_) [[unlikely]] {
    clear();
    generation_ = current;
  }
  const Settings& now = Settings::present();
  if (last_ && last_->next && last_->next->op == invocation.op && last_->next->fits(invocation, found, now))
    [[likely]] {
    return last_ = last_->next;
  }
  Latest& latest = by_operator_[&invocation.op.schema()];
  const auto fitting = std::ranges::find_if(
      latest, [&](const Ref<CallTemplate>& each) { return each->fits(invocation, found, now); });
  if (fitting != latest.end()) {
    std::rotate(latest.begin(), fitting, fitting + 1);
  } else {
    Ref<CallTemplate> made(new CallTemplate(invocation, found));
    if (holds_object(*made)) {
      last_.reset();
      return made;
    }
    if (latest.size() == kMostOfAnOperator) {
      latest.back()->next.reset();
      latest.pop_back();
    }
    latest.insert(latest.begin(), std::move(made));
  }
  if (last_) last_->next = latest.front();
  return last_ = latest.front();
}

// Those that follow one another may do so in a circle.
void CallTemplates::clear() {
  for (auto& [_, latest] : by_operator_) {
    for (const Ref<CallTemplate>& each : latest) each->next.reset();
  }
  by_operator_.clear();
  last_.reset();
}

}  // namespace rematfn
