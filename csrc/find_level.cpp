// SPDX-License-Identifier: Apache-2.0
#include "find_level.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>

#include "boundary.h"
#include "stack_utils.h"

namespace rematfn {
namespace {

// A tensor on the storage of a level's cell, made where no level saw it; or of a bare storage.
// See Note [An evicted storage knows its cell]
Cell* adopt(c10::TensorImpl& tensor) {
  Cell* cell = cell_evicted_from(*tensor.unsafe_storage().unsafeGetStorageImpl());
  if (cell != nullptr) attach(tensor, c10::intrusive_ptr<Cell>::reclaim_copy(cell));
  return cell;
}

// A tensor over the storage that `set_` is given, with the handle of the storage's cell; or none.
at::Tensor stand_in_for(const c10::Storage& storage, const Level& level) {
  const DomainLock lock(level.domain);
  Cell* cell = level.tensor_domain().cell_on(*storage.unsafeGetStorageImpl());
  if (cell == nullptr) return {};
  const at::Tensor tensor = bytes_of(storage);
  attach(*tensor.unsafeGetTensorImpl(), c10::intrusive_ptr<Cell>::reclaim_copy(cell));
  return tensor;
}

// A fake tensor has the keys of the device that it pretends to be on; the thread's make it meta.
bool is_abstract(const c10::TensorImpl& tensor) {
  const auto keys = tensor.key_set() | c10::impl::tls_local_dispatch_key_set().included_;
  return keys.has_backend(c10::BackendComponent::MetaBit);
}

// A leaf's gradient is accumulated at the end of a backward: what arrives there has left it.
bool is_outside_of_backward() {
  const auto node = torch::autograd::get_current_node();
  if (!node) return true;
  const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get());
  return leaf != nullptr && leaf->variable.defined() && !has_key(leaf->variable);
}

}  // namespace

std::shared_ptr<Domain> find_domain(c10::ArrayRef<c10::IValue> arguments) {
  std::shared_ptr<Domain> found;
  if (const Level* level = current_level()) found = level->domain;
  for (const c10::IValue& value : arguments) {
    for_each_tensor(value, [&](const at::Tensor& tensor, int) {
      c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
      if (!is_plain(impl)) return;
      std::shared_ptr<Domain> domain = domain_of(impl);
      if (!domain && adopt(impl) != nullptr) domain = domain_of(impl);
      if (!domain || domain == found) return;
      if (!found) {
        found = std::move(domain);
        return;
      }
      const DomainLock lock(domain);
      while (const Cell* cell = cell_of(impl)) seal(tensor, *cell->level);
    });
  }
  return found;
}

Level* find_level(Invocation& invocation, FoundTensors& found, Arguments& kind) {
  const c10::ArrayRef<c10::IValue> arguments = invocation.arguments();
  Level* level = current_level();
  bool opaque = false;
  bool abstract = false;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = arguments[i];
    const bool lone = value.isTensor();
    if (!lone && value.isStorage() && level != nullptr) {
      const at::Tensor tensor = stand_in_for(value.toStorage(), *level);
      if (tensor.defined()) {
        c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
        found.push_back({impl, cell_of(*impl), impl->unsafe_storage().unsafeGetStorageImpl(),
                         static_cast<std::uint16_t>(i), -1});
        invocation.keep(tensor);
      }
    }
    opaque |= !lone && (value.isStorage() || value.isObject() || value.isCapsule() ||
                        value.isPyObject());
    const bool readable = for_each_tensor(value, [&](const at::Tensor& tensor, int index) {
      c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
      if (!is_plain(*impl)) {
        opaque = true;
        abstract |= is_abstract(*impl);
        return;
      }
      Cell* cell = cell_of(*impl);
      if (cell != nullptr) {
        Level& owner = *cell->level;
        // See Note [Why the backward finds its level again]
        if (!owner.active && is_outside_of_backward()) {
          seal(tensor, owner);
          cell = cell_of(*impl);
        }
        if (cell != nullptr && (level == nullptr || cell->level->depth > level->depth)) {
          level = cell->level.get();
        }
      }
      found.push_back({impl, cell, impl->unsafe_storage().unsafeGetStorageImpl(),
                       static_cast<std::uint16_t>(i), index});
    });
    opaque |= !readable;
  }
  const auto is_ours = [](const FoundTensor& f) { return f.cell != nullptr; };
  if (opaque) kind = Arguments::kOpaque;
  if (abstract && std::none_of(found.begin(), found.end(), is_ours)) {
    kind = Arguments::kAbstract;
    return nullptr;
  }
  return level;
}

void mark_writes(const Invocation& invocation, FoundTensors& found) {
  const OperatorFacts& facts = invocation.facts;
  const c10::ArrayRef<c10::IValue> arguments = invocation.arguments();
  if (facts.writes.empty() && facts.training_writes.empty()) return;
  const bool training = facts.training_argument >= 0 &&
                        arguments[facts.training_argument].isBool() &&
                        arguments[facts.training_argument].toBool();
  const auto contains = [](const auto& positions, std::uint16_t position) {
    return std::find(positions.begin(), positions.end(), position) != positions.end();
  };
  for (FoundTensor& f : found) {
    f.written = contains(facts.writes, f.position) ||
                (training && contains(facts.training_writes, f.position));
  }
}

}  // namespace rematfn
