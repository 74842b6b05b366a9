// SPDX-License-Identifier: Apache-2.0
#include "levels/boundary.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <utility>

#include "engine/gather.h"
#include "levels/allocator.h"
#include "levels/gradient_edges.h"
#include "levels/refusals.h"
#include "levels/weight_cache.h"
#include "tensors/layers.h"
#include "tensors/torch_compat.h"

namespace rematfn {

void end_level(LevelHandle& handle, Ending ending) {
  const std::string interleaved = pop_level(handle);
  const bool lost = !interleaved.empty();
  if (ending != Ending::kReturned || lost) forget_leaves(handle.level());
  // Who interrupts does not want to wait for replays; an operator will still find the bytes.
  if (ending == Ending::kFailed || lost) {
    hand_over(handle, /*sealed=*/false);
    bring_survivors_back(handle);
  }
  if (ending == Ending::kReturned && lost) throw std::runtime_error(interleaved);
}

void give_cell(c10::TensorImpl& tensor, Cell& cell, Level* heir) {
  Level& level = level_of(cell);
  TensorVersion& version = *cell.version;
  if (heir != nullptr) {
    if (version.table) level.domain->give(version, *heir);
    cell.move_to(*heir);
    return;
  }
  if (version.place != Place::kHere) {
    Version* wanted = &version;
    materialize_for(level, wanted, "a result");
  }
  // See Note [A level's work is in one order]
  level.tensor_domain().streams.settle();
  level.domain->observers.note_seal(version);
  const bool sealed_before = version.outside != nullptr && !version.handed_over;
  version.handed_over = false;
  level.tensor_domain().make_outside(version);
  detach(tensor);
  // A caller that overwrites its result must not change what is replayed from it. It may have done so
  // by the time that another tensor on the storage is sealed.
  if (sealed_before) return;
  level.tensor_domain().outside.note_counter(version, tensor);
  level.tensor_domain().outside.note_read(version, tensor);
}

namespace {

void seal_cell(c10::TensorImpl& tensor, Level& level) {
  const std::shared_ptr<Domain> domain = domain_of(tensor);
  if (!domain) {
    // See Note [Bytes beside operators]
    if (level.heir() == nullptr && is_plain(tensor)) {
      count_no_more(*tensor.unsafe_storage().unsafeGetStorageImpl());
    }
    return;
  }
  const DomainLock lock(domain);
  Cell* cell = cell_of(tensor);
  if (cell == nullptr) return;  // another thread has sealed it
  // Another tree's tensor that came through here: its own level lets go of it.
  Level& leaving = cell->level->domain == level.domain ? level : level_of(*cell);
  if (level_of(*cell).depth < leaving.depth) return;  // an enclosing level's, which it stays
  give_cell(tensor, *cell, leaving.heir());
}

}  // namespace

// See Note [What leaves is sealed]
void seal(const at::Tensor& tensor, Level& level) {
  const at::Tensor inner = for_each_layer(tensor, [&](const at::Tensor& layer) {
    const at::Tensor& tangent = layer._fw_grad(/*level=*/0);
    if (tangent.defined()) seal(tangent, level);
    cut_graph(layer, level);
  });
  const std::vector<at::Tensor> held = held_by_subclass(inner);
  for (const at::Tensor& part : held) seal(part, level);
  if (!held.empty()) return;
  seal_cell(*inner.unsafeGetTensorImpl(), level);
  for_each_part(inner, [&](const at::Tensor& part) { seal_cell(*part.unsafeGetTensorImpl(), level); });
}

void note_leaf(Level& level, c10::TensorImpl& tensor) {
  if (!level.known_leaves.insert(&tensor).second) return;
  level.leaves.emplace_back(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(&tensor));
}

void forget_leaves(Level& level) {
  const DomainLock lock(level.domain);
  level.leaves.clear();
  level.known_leaves.clear();
}

namespace {

// Seals the gradients accumulated on leaves that operators of `level` have read.
void seal_leaf_gradients(Level& level) {
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> leaves;
  {
    const DomainLock lock(level.domain);
    leaves.swap(level.leaves);
    level.known_leaves.clear();
  }
  Level* heir = level.heir();
  for (const auto& weak : leaves) {
    auto impl = weak.lock();
    if (!impl) continue;
    const at::Tensor leaf{std::move(impl)};
    if (leaf.grad().defined()) seal(leaf.grad(), level);
    {
      const DomainLock lock(level.domain);
      if (const auto watched = level.watched_leaves.lock()) remember_leaf(leaf, *watched);
    }
    if (heir != nullptr) {
      const DomainLock lock(heir->domain);
      note_leaf(*heir, *leaf.unsafeGetTensorImpl());
    }
  }
}

// See Note [Results count until the last is there]
class HandingOut {
 public:
  explicit HandingOut(Level& level) : level_(level) {
    const DomainLock lock(level_.domain);
    level_.domain->begin_handing_out();
  }
  ~HandingOut() {
    const DomainLock lock(level_.domain);
    level_.domain->end_handing_out();
  }
  HandingOut(const HandingOut&) = delete;
  HandingOut& operator=(const HandingOut&) = delete;

 private:
  Level& level_;
};

// What it returns, and the gradients of leaves. Returns how many bytes that is.
std::size_t bring_back_together(Level& level, const std::vector<at::Tensor>& tensors) {
  const DomainLock lock(level.domain);
  std::vector<Version*> wanted;
  const auto want = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    for_each_innermost(tensor, [&](const at::Tensor& inner) {
      Cell* cell = cell_of(*inner.unsafeGetTensorImpl());
      if (cell == nullptr || cell->level->domain != level.domain) return;
      if (level_of(*cell).depth < level.depth || !cell->version->table) return;
      wanted.push_back(cell->version.get());
    });
  };
  for (const at::Tensor& tensor : tensors) want(tensor);
  for (const auto& weak : level.leaves) {
    if (auto impl = weak.lock()) want(at::Tensor(std::move(impl)).grad());
  }
  level.tensor_domain().bury_unreported();
  // In their order, and where they find no room as well: for the figure they have to be there together.
  const auto note_seals = [&] {
    for (const Version* version : wanted) level.domain->observers.note_seal(*version);
  };
  try {
    gather(*level.domain, wanted);
  } catch (const NoRoom& why) {
    note_seals();
    raise_budget_error(why, "what it returns");
  }
  note_seals();
  std::sort(wanted.begin(), wanted.end());  // several tensors may be on one
  wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
  std::size_t sum = 0;
  for (const Version* version : wanted) sum += version->nbytes;
  return sum;
}

}  // namespace

std::size_t hand_out(LevelHandle& handle, const std::vector<at::Tensor>& tensors, bool goes_on) {
  Level& level = handle.level();
  const Table& root = *level.domain->root;
  const std::size_t before = root.results_left();
  std::size_t returned = 0;
  {
    std::optional<HandingOut> scope;
    if (level.heir() == nullptr) {
      scope.emplace(level);
      returned = bring_back_together(level, tensors);
    }
    if (!goes_on) hand_over(handle, /*sealed=*/false);  // what makes room for the rest
    for (const at::Tensor& tensor : tensors) seal(tensor, level);
    seal_leaf_gradients(level);  // by now it is known whether a graph leads to the leaves
    const std::size_t sealed = root.results_left();
    seal_cached_casts(level);
    returned += root.results_left() - sealed;
  }
  goes_on ? bring_survivors_back(handle) : hand_over(handle, /*sealed=*/true);
  const std::size_t left = root.results_left() - before;
  return left - std::min(left, returned);
}

void share_handles(c10::ArrayRef<at::Tensor> results, c10::ArrayRef<at::Tensor> arguments) {
  for (const at::Tensor& result : results) {
    c10::TensorImpl* impl = innermost(result).unsafeGetTensorImpl();
    if (!has_level_key(*impl) || domain_of(*impl)) continue;
    for (const at::Tensor& argument : arguments) {
      const at::Tensor other = innermost(argument);
      const std::shared_ptr<Domain> domain = domain_of(*other.unsafeGetTensorImpl());
      if (!domain || !result.is_alias_of(argument)) continue;
      const DomainLock lock(domain);
      Cell* cell = cell_of(*other.unsafeGetTensorImpl());
      if (cell != nullptr) attach(*impl, c10::intrusive_ptr<Cell>::reclaim_copy(cell));
    }
    if (!domain_of(*impl)) detach(*impl);
  }
}

bool has_key(const at::Tensor& tensor) {
  bool found = false;
  if (!tensor.defined()) return found;
  for_each_innermost(
      tensor,
      [&](const at::Tensor& inner) { found |= has_level_key(*inner.unsafeGetTensorImpl()); });
  return found;
}

void mark(const at::Tensor& tensor, const std::string& name) {
  for_each_innermost(tensor, [&](const at::Tensor& inner) {
    const std::shared_ptr<Domain> domain = domain_of(*inner.unsafeGetTensorImpl());
    if (!domain) return;
    const DomainLock lock(domain);
    Cell* cell = cell_of(*inner.unsafeGetTensorImpl());
    if (cell == nullptr) return;  // another thread has sealed it
    Version& version = *cell->version;
    if (version.table) domain->mark(version, name);
    domain->observers.note_mark(version, name);
  });
}

bool with_contents(const at::Tensor& tensor, const std::function<bool(Domain&, Version&)>& what) {
  const at::Tensor inner = innermost(tensor);
  const std::shared_ptr<Domain> domain = domain_of(*inner.unsafeGetTensorImpl());
  if (!domain) return false;
  const DomainLock lock(domain);
  Cell* cell = cell_of(*inner.unsafeGetTensorImpl());
  return cell != nullptr && what(*domain, *cell->version);
}

}  // namespace rematfn
