// SPDX-License-Identifier: Apache-2.0
#include "operators/find_level.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>

#include "levels/boundary.h"
#include "levels/governed_nodes.h"
#include "operators/raw_access.h"
#include "tensors/layers.h"
#include "tensors/stack_utils.h"

namespace rematfn {
namespace {

// A tensor on the storage of a level's cell, made where no level saw it; or of a bare storage.
// See Note [An evicted storage knows its cell]
Cell* adopt(c10::TensorImpl& tensor) {
  Cell* cell = cell_evicted_from(*tensor.unsafe_storage().unsafeGetStorageImpl());
  if (cell != nullptr) attach(tensor, c10::intrusive_ptr<Cell>::reclaim_copy(cell));
  return cell;
}

at::Tensor tensor_of(c10::TensorImpl& impl) {
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(&impl));
}

// See Note [Kernels above a level]
void find_parts(Invocation& invocation, const at::Tensor& tensor, std::size_t position, int index,
                FoundTensors& found) {
  // It has the version counter of its views.
  if (tensor.is_nested()) add(found, *tensor.unsafeGetTensorImpl(), position, index);
  for_each_part(tensor, [&](const at::Tensor& part) {
    if (!part.defined() || !is_plain(*part.unsafeGetTensorImpl())) return;
    add(found, *part.unsafeGetTensorImpl(), position, index);
    invocation.keep(part);
  });
}

// Of a storage that `set_` is given, a tensor over it stands for the cell.
void find_storages(Invocation& invocation, const Level& level, FoundTensors& found) {
  const c10::ArrayRef<c10::IValue> arguments = invocation.arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].isStorage()) continue;
    const c10::Storage storage = arguments[i].toStorage();
    Cell* cell = level.tensor_domain().cell_on(*storage.unsafeGetStorageImpl());
    if (cell == nullptr) continue;
    const at::Tensor tensor = bytes_of(storage, *cell);
    add(found, *tensor.unsafeGetTensorImpl(), i, /*index=*/-1);
    invocation.keep(tensor);
  }
}

// A fake tensor has the keys of the device that it pretends to be on; the thread's make it meta.
bool is_abstract(const c10::TensorImpl& tensor) {
  const auto keys = tensor.key_set() | c10::impl::tls_local_dispatch_key_set().included_;
  return keys.has_backend(c10::BackendComponent::MetaBit);
}

// A leaf's gradient is accumulated at the end of a backward: what arrives there has left it. The leaf's
// own hooks may be a level's.
bool is_outside_of_backward(const torch::autograd::Node* node) {
  if (node == nullptr) return true;
  if (node->sequence_nr() != kAccumulator) return false;
  const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node);
  return leaf != nullptr && leaf->variable.defined() && !has_key(leaf->variable) &&
         level_of_running_node(node) == nullptr;
}

}  // namespace

void add(FoundTensors& found, c10::TensorImpl& tensor, std::size_t position, int index) {
  FoundTensor& f = found.emplace_back();  // See Note [Records are filled in place]
  f.tensor = &tensor;
  f.storage = tensor.unsafe_storage().unsafeGetStorageImpl();
  f.index = index;
  f.position = static_cast<std::uint16_t>(position);
}

ArgumentKind find_tensors(Invocation& invocation, FoundTensors& found) {
  const c10::ArrayRef<c10::IValue> arguments = invocation.arguments();
  ArgumentKind kind = ArgumentKind::kPlain;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = arguments[i];
    if (value.isScalar() || value.isNone()) continue;
    const bool readable = for_each_tensor(value, [&](const at::Tensor& tensor, int index) {
      c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
      if (is_plain(impl)) {
        add(found, impl, i, index);
      } else {
        find_parts(invocation, tensor, i, index, found);
        kind = std::max(kind, is_abstract(impl) ? ArgumentKind::kAbstract : ArgumentKind::kOpaque);
      }
    });
    if (value.isTensor()) continue;
    if (!readable) {
      for_each_nested_tensor(value, [&](const at::Tensor& tensor) {
        c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
        if (is_plain(impl)) add(found, impl, i, /*index=*/-1);
      });
    }
    if (!readable || value.isStorage() || value.isObject() || value.isCapsule() ||
        value.isPyObject()) {
      kind = std::max(kind, ArgumentKind::kOpaque);
    }
  }
  return kind;
}

FoundDomain find_domain(const FoundTensors& found) {
  FoundDomain ours;
  ours.node = running_node();
  ours.level = level_of_thread(ours.node);
  if (ours.level != nullptr) [[likely]] ours.domain = ours.level->domain.get();
  for (const FoundTensor& f : found) {
    std::shared_ptr<Domain> theirs;
    if (has_level_key(*f.tensor)) {
      if (ours.domain != nullptr && is_of(*ours.domain, *f.tensor)) [[likely]] continue;
      theirs = domain_of(*f.tensor);
    }
    if (!theirs && adopt(*f.tensor) != nullptr) theirs = domain_of(*f.tensor);
    if (!theirs || theirs.get() == ours.domain) [[likely]] continue;
    if (ours.domain == nullptr) {
      ours.domain = theirs.get();
      ours.alive = std::move(theirs);
      continue;
    }
    const DomainLock lock(theirs);
    while (const Cell* cell = cell_of(*f.tensor)) seal(tensor_of(*f.tensor), level_of(*cell));
  }
  return ours;
}

Level* innermost_level(const FoundDomain& domain, FoundTensors& found) {
  Level* level = domain.level;
  for (FoundTensor& f : found) {
    f.cell = cell_of(*f.tensor);
    // See Note [Why the backward finds its level again]
    if (f.cell != nullptr && !level_of(*f.cell).active && is_outside_of_backward(domain.node)) {
      seal(tensor_of(*f.tensor), level_of(*f.cell));
      f.cell = cell_of(*f.tensor);
    }
    if (f.cell != nullptr && (level == nullptr || level_of(*f.cell).depth > level->depth)) {
      level = &level_of(*f.cell);
    }
  }
  return level;
}

Level* find_level(Invocation& invocation, const FoundDomain& domain, FoundTensors& found, ArgumentKind& kind) {
  if (kind != ArgumentKind::kPlain && domain.level != nullptr) [[unlikely]] {
    find_storages(invocation, *domain.level, found);
  }
  Level* level = innermost_level(domain, found);
  const auto is_ours = [](const FoundTensor& f) { return f.cell != nullptr; };
  if (kind != ArgumentKind::kAbstract) [[likely]] return level;
  if (std::none_of(found.begin(), found.end(), is_ours)) return nullptr;
  kind = ArgumentKind::kOpaque;
  return level;
}

std::uint32_t bumps_so_far(const Invocation& invocation, const FoundTensors& found,
                           const c10::StorageImpl& storage) {
  if (!invocation.facts.may_count_first) return 0;
  return static_cast<std::uint32_t>(
      std::count_if(found.begin(), found.end(),
                    [&](const FoundTensor& f) { return f.written && f.storage == &storage; }));
}

void find_writes(const Invocation& invocation, FoundTensors& found) {
  const OperatorFacts& facts = invocation.facts;
  const c10::ArrayRef<c10::IValue> arguments = invocation.arguments();
  if (!facts.may_write()) return;
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
