// SPDX-License-Identifier: Apache-2.0
//
// stored.cpp: what `f` has stored away, when it is over.

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>

#include <deque>
#include <span>

#include "base/interpreter.h"
#include "levels/level.h"
#include "tensors/thread_keys.h"
#include "tensors/torch_compat.h"

namespace rematfn {
namespace {

// Makes them resident, but for what cannot be had again: whoever reads it later will hear why. Throws
// NoRoom; what finds no room here leaves in another order, so that no budget needs more for it.
void try_to_have(Domain& domain, std::span<Version* const> wanted) {
  std::size_t& min_budget = domain.root->statistics.min_budget;
  const std::size_t before = min_budget;
  try {
    domain.gather(wanted);
  } catch (const NoRoom&) {
    min_budget = before;
    throw;
  } catch (const std::exception& error) {
    if (is_stop(error)) throw;
  }
}
bool try_to_have(Version& version) {
  Version* wanted = &version;
  try_to_have(*version.table->domain, {&wanted, 1});
  return version.is_here();
}

}  // namespace

void bring_survivors_back(Level& level) {
  const DomainLock lock(level.domain);
  level.tensor_domain().bury_unreported();
  std::deque<Pinned> survivors;  // lest one takes the room of another
  for (Version* v = level.newest; v != nullptr; v = v->previous) {
    if (!v->has_tensor) continue;
    try {
      if (!v->is_here() && !try_to_have(*v)) continue;
    } catch (const NoRoom&) {
      break;
    }
    survivors.emplace_back(*v);
  }
}

namespace {

// See Note [What is stored away outlives what it was made of]
void find_stored(const Level& level, bool sealed, std::vector<Ref<TensorVersion>>& stored) {
  const TensorDomain& domain = level.tensor_domain();
  for (Version* v = level.newest; v != nullptr; v = v->previous) {
    auto& version = static_cast<TensorVersion&>(*v);
    if (!v->has_tensor || version.cell() == nullptr || version.cell()->storage.expired()) continue;
    if (domain.savers.have_freed(version.savers) ||
        (sealed && !level.graph_leaves && v->readers == nullptr)) {
      stored.emplace_back(&version);
    }
  }
  for (const Table* table : level.inner) {
    const auto& inner = static_cast<const Level&>(*table);
    if (!inner.active) find_stored(inner, sealed && !level.graph_leaves, stored);
  }
}

// Note [A backward is over before its thread has freed its graph]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// An accelerator's nodes run on a thread of autograd's. It says that a backward is over, and then frees
// the last node, the graph, and all that this has saved. So when `f` returns, what is dead may still
// look as if somebody had stored it away. Made again and handed over, it would be bytes that no budget
// counts, as many as the graph has. The thread takes its tasks in turn: when it has run one more, which
// does nothing, it has freed the graph.
struct Nothing final : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { return {}; }
};

void wait_for_backward_thread(c10::Device device) {
  at::Tensor no_elements;
  {
    const BackendScope scope;
    no_elements = at::empty({0}, at::TensorOptions(device));
  }
  const auto node = make_node<Nothing>();
  node->add_input_metadata(no_elements);
  torch::autograd::Engine::get_default_engine().execute(
      {{node, 0}}, {no_elements}, /*keep_graph=*/false, /*create_graph=*/false,
      /*accumulate_grad=*/true);
}

}  // namespace

void hand_over(Level& level, bool sealed) {
  const auto may_store = [&] {
    return !level.active && level.heir() == nullptr &&
           (sealed || level.tensor_domain().savers.has_any());
  };
  std::vector<c10::Device> devices;
  if (level.tensor_domain().streams.any()) {
    const DomainLock lock(level.domain);
    std::vector<Ref<TensorVersion>> seem_stored;
    if (may_store()) find_stored(level, sealed, seem_stored);
    if (!seem_stored.empty()) devices = level.tensor_domain().streams.devices();
  }
  // See Note [A backward is over before its thread has freed its graph]
  for (const c10::Device device : devices) wait_for_backward_thread(device);
  const DomainLock lock(level.domain);
  if (!may_store()) return;
  level.tensor_domain().bury_unreported();
  std::vector<Ref<TensorVersion>> stored;
  find_stored(level, sealed, stored);
  std::vector<Version*> together;
  for (const Ref<TensorVersion>& version : stored) together.push_back(version.get());
  try {
    try_to_have(*level.domain, together);
  } catch (const NoRoom&) {
    // one by one, as far as there is room
  }
  // What finds no room is tried again when the others have left.
  std::vector<Ref<TensorVersion>> crowded;
  for (const std::vector<Ref<TensorVersion>>* some : {&stored, &crowded}) {
    for (const Ref<TensorVersion>& version : *some) {
      try {
        if (!try_to_have(*version)) continue;
      } catch (const NoRoom&) {
        if (some == &stored) crowded.push_back(version);
        continue;
      }
      level.domain->observers.note(Trace::What::kStored, *version);
      level.tensor_domain().make_outside(*version);
      version->handed_over = true;
    }
  }
  if (sealed && !level.graph_leaves) bring_survivors_back(level);
}

}  // namespace rematfn
