// SPDX-License-Identifier: Apache-2.0
#include "levels/boundary.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "levels/allocator.h"
#include "levels/refusals.h"
#include "tensors/layers.h"
#include "tensors/torch_compat.h"

namespace rematfn {

namespace {

// The leaves that are still there; none stays noted.
std::vector<at::Tensor> take_leaves(Level& level) {
  std::vector<at::Tensor> leaves;
  const DomainLock lock(level.domain);
  for (const auto& weak : std::exchange(level.leaves, {})) {
    if (auto impl = weak.lock()) leaves.emplace_back(std::move(impl));
  }
  level.known_leaves.clear();
  return leaves;
}

}  // namespace

void end_level(LevelHandle& handle, Ending ending) {
  Level& level = handle.level();
  const std::string interleaved = pop_level(level);
  const bool lost = !interleaved.empty();
  // Gradients of leaves stay the level's until they are used.
  if (ending != Ending::kReturned || lost) static_cast<void>(take_leaves(level));
  // Who interrupts does not want to wait for replays; an operator will still find the bytes.
  if (ending == Ending::kFailed || lost) {
    hand_over(level, /*sealed=*/false);
    bring_survivors_back(level);
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
  if (!version.is_here()) {
    Version* wanted = &version;
    materialize_for(level, wanted, "a result");
  }
  // See Note [A level's work is in one order]
  level.tensor_domain().streams.settle();
  level.domain->observers.note(Trace::What::kSeal, version);
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

void seal_cell(const at::Tensor& tensor, Level& level) {
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const bool was_levels = with_cell(tensor, [&](Cell& cell) {
    // Another tree's tensor that came through here: its own level releases it.
    Level& leaving = cell.level->domain == level.domain ? level : level_of(cell);
    if (level_of(cell).depth < leaving.depth) return;  // an enclosing level's, which it stays
    give_cell(impl, cell, leaving.heir());
  });
  // See Note [Bytes beside operators]
  if (!was_levels && level.heir() == nullptr && is_plain(impl)) {
    count_no_more(*impl.unsafe_storage().unsafeGetStorageImpl());
  }
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
  seal_cell(inner, level);
  for_each_part(inner, [&](const at::Tensor& part) { seal_cell(part, level); });
}

void note_leaf(Level& level, c10::TensorImpl& tensor) {
  if (!level.known_leaves.insert(&tensor).second) return;
  level.leaves.emplace_back(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(&tensor));
}

namespace {

// Seals the gradients accumulated on leaves that operators of `level` have read.
void seal_leaf_gradients(Level& level) {
  Level* heir = level.heir();
  for (const at::Tensor& leaf : take_leaves(level)) {
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

// What it returns, and the gradients of leaves.
std::vector<Ref<Version>> bring_back_together(Level& level, const std::vector<at::Tensor>& tensors) {
  const DomainLock lock(level.domain);
  level.domain->begin_handing_out();
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
    for (const Version* version : wanted) level.domain->observers.note(Trace::What::kSeal, *version);
  };
  try {
    level.domain->gather(wanted);
  } catch (const NoRoom& why) {
    note_seals();
    raise_budget_error(why, "what it returns");
  }
  note_seals();
  std::sort(wanted.begin(), wanted.end());  // several tensors may be on one
  wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
  return {wanted.begin(), wanted.end()};
}

// What `f` has stored away is not to take the room of what it returns.
void hand_over_beside(Level& level, const std::vector<Ref<Version>>& results) {
  const auto for_each = [&](void (&change)(Version&)) {
    const DomainLock lock(level.domain);
    for (const Ref<Version>& version : results) change(*version);
  };
  for_each(pin);
  const auto unpin_all = c10::make_scope_exit([&] { for_each(unpin); });
  hand_over(level, /*sealed=*/false);
}

}  // namespace

std::size_t hand_out(LevelHandle& handle, const std::vector<at::Tensor>& tensors, bool goes_on) {
  Level& level = handle.level();
  const Table& root = *level.domain->root;
  const std::size_t before = root.results_left();
  std::size_t returned = 0;
  {
    const bool leaves_all = level.heir() == nullptr;
    // See Note [Results count until the last is there]
    const auto until_the_last_is_there = c10::make_scope_exit([&] {
      if (!leaves_all) return;
      const DomainLock lock(level.domain);
      level.domain->end_handing_out();
    });
    if (leaves_all) {
      const std::vector<Ref<Version>> results = bring_back_together(level, tensors);
      for (const Ref<Version>& version : results) returned += version->nbytes;
      if (!goes_on) hand_over_beside(level, results);
    }
    for (const at::Tensor& tensor : tensors) seal(tensor, level);
    seal_leaf_gradients(level);  // by now it is known whether a graph leads to the leaves
  }
  goes_on ? bring_survivors_back(level) : hand_over(level, /*sealed=*/true);
  const std::size_t left = root.results_left() - before;
  return left - std::min(left, returned);
}

void share_handles(c10::ArrayRef<at::Tensor> results, c10::ArrayRef<at::Tensor> arguments) {
  for (const at::Tensor& result : results) {
    c10::TensorImpl* impl = innermost(result).unsafeGetTensorImpl();
    if (!has_level_key(*impl) || domain_of(*impl)) continue;
    for (const at::Tensor& argument : arguments) {
      with_cell(innermost(argument), [&](Cell& cell) {
        if (!result.is_alias_of(argument)) return;
        attach(*impl, c10::intrusive_ptr<Cell>::reclaim_copy(&cell));
      });
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
    with_cell(inner, [&](Cell& cell) {
      Version& version = *cell.version;
      Domain& domain = *cell.level->domain;
      if (version.table) domain.mark(version, name);
      domain.observers.note_mark(version, name);
    });
  });
}

}  // namespace rematfn
