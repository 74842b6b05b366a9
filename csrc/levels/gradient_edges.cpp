// SPDX-License-Identifier: Apache-2.0
//
// gradient_edges.cpp: the edges of the autograd graph that gradients leave a level by, and enter.

#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <typeinfo>
#include <utility>
#include <vector>

#include "levels/allocator.h"
#include "levels/boundary.h"
#include "levels/governed_nodes.h"
#include "tensors/layers.h"
#include "tensors/thread_keys.h"
#include "tensors/torch_compat.h"

namespace rematfn {
namespace {

using torch::autograd::Edge;
using torch::autograd::FunctionPreHook;
using torch::autograd::Node;
using torch::autograd::variable_list;

// Where a node was made, and when.
struct Birth {
  explicit Birth(const Node& node) : thread(node.thread_id()), number(node.sequence_nr()) {}
  [[nodiscard]] bool is_accumulator() const { return number == kAccumulator; }

  std::uint64_t thread;
  std::uint64_t number;  // among the thread's own
};

bool in_region(const Birth& node, const Level& level) {
  return !node.is_accumulator() && level.made_node(node.thread, node.number);
}

// Note [A hook does not touch the hooks of its node]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// With create_graph a gradient that is taken from a node has a graph that leads back to that node. To
// seal it is to watch the node: to add to the hooks that the engine is just walking through, one of
// which is us. So such a node is watched when the backward is done.
constinit thread_local const Node* in_hook_of = nullptr;

// A gradient that no level made, where one leaves. See Note [The operators of a node are its level's]
void leave_count(const at::Tensor& gradient) {
  c10::TensorImpl& impl = *gradient.unsafeGetTensorImpl();
  if (current_level() != nullptr || is_backward_governed() || !is_plain(impl)) return;
  count_no_more(*impl.unsafe_storage().unsafeGetStorageImpl());
}

// In a hook: `leave` is called with each gradient, the part of it that is a level tensor, and the cell of that.
template <class Leave>
void for_each_leaving(const variable_list& gradients, const Leave& leave) {
  const Node* outer = std::exchange(in_hook_of, running_node());
  const auto restore = c10::make_scope_exit([&] { in_hook_of = outer; });
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.defined()) continue;
    for_each_innermost(gradient, [&](const at::Tensor& inner) {
      const auto leaves = [&](Cell& cell) { leave(gradient, inner, cell); };
      if (!with_cell(inner, leaves)) leave_count(inner);
    });
  }
}

// See Note [Seals are hooks on the target]
class Seal final : public WatchingHook {
 public:
  explicit Seal(const Node& target) : target_(target) {}

 private:
  void see(const variable_list& gradients) override;

  const Birth target_;
};

bool is_seal(const std::unique_ptr<FunctionPreHook>& hook) { return typeid(*hook) == typeid(Seal); }

// Note [Hooks may write parameters]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A hook on a leaf, above all one that runs after its gradient was accumulated, may step an optimiser
// and free the gradient: in eager code nothing reads the parameter any more. We may have to: the
// gradient on its way to the layer below was made from the parameter, and can be evicted. Nothing in
// such a step belongs to a level, so no operator of it would come to us. Hence the key is included
// from the first hook of a leaf that has hooks of the program's, or whose node has, until its node is
// done (the engine restores the thread's state for each node), and the kernel saves the old contents
// of what is written for those who have read them.
bool has_hooks(const at::Tensor& leaf) {
  const auto& hooks = torch::autograd::impl::hooks(leaf);
  return torch::autograd::impl::post_acc_grad_hooks(leaf) != nullptr ||
         !std::all_of(hooks.begin(), hooks.end(), is_seal);
}

// A leaf that a level has made. See Note [The operators of a node are its level's], Rule 2
bool is_made_with_hooks(const at::Tensor& leaf) {
  return leaf.is_leaf() && leaf.requires_grad() && has_key(leaf) && has_hooks(leaf);
}

void see_operators_of_hooks() {
  const auto node = torch::autograd::get_current_node();
  const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get());
  if (leaf == nullptr || !leaf->variable.defined()) return;
  const bool node_has_hooks = !node->pre_hooks().empty() || !node->post_hooks().empty();
  if (node_has_hooks || has_hooks(leaf->variable)) see_operators();
}

// Note [Seals are hooks on the target]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A node that gradients reach from inside a level has a hook that seals what arrives. Why there, and
// not a hook or a node on each edge: autograd adds up in a node's input buffer what all edges bring,
// in the order in which it comes. Floating-point sums depend on that order and on how they are
// bracketed, so nothing may be put between, or x.grad would differ in its last bits. And until they
// are added up the parts are the level's to evict; sealed one by one they would pile up uncounted.
//
// The user's hooks on the same tensor are to see a sealed gradient, and what they return (a product
// with something that `f` stored away) is to leave sealed as well: so one of ours comes first, and
// one comes last.
//
// The hook of an AccumulateGrad node lives with its leaf, and stays there: it knows no level and
// leaves alone whatever is not a level tensor. But Python throws a leaf's hooks away when it
// registers the first one of its own. So a level remembers the leaves it has watched and looks at
// them again when a backward enters it.
void Seal::see(const variable_list& gradients) {
  if (target_.is_accumulator()) see_operators_of_hooks();
  // What arrives at the target leaves each level up to the one whose region the target is in. A leaf
  // has none: a level that still runs, or whose node has begun the backward, keeps what arrives there.
  const auto stays_in = [&](const Level& level) {
    if (!target_.is_accumulator()) return in_region(target_, level);
    return level.active || is_backward_governed(&level);
  };
  for_each_leaving(gradients, [&](const at::Tensor& gradient, const at::Tensor& inner, Cell& cell) {
    Level* heir = &level_of(cell);
    if (stays_in(*heir)) return;
    do {
      for_each_layer(gradient, [&](const at::Tensor& layer) { cut_graph(layer, *heir); });
      heir = heir->enclosing_level();
    } while (heir != nullptr && !stays_in(*heir));
    give_cell(*inner.unsafeGetTensorImpl(), cell, heir);
  });
}

// On the node of an output, seals a gradient that is taken from there: asked for with
// autograd.grad(z, y), y an output too, or retained. It would never cross an edge out of the region.
class OutputHook final : public WatchingHook {
 public:
  explicit OutputHook(Node& output) : output_(output) {}

 private:
  void see(const variable_list& gradients) override {
    if (output_.retains_grad_hooks().empty()) {
      const auto* plan = torch::autograd::get_current_graph_task_exec_info();
      if (plan == nullptr) return;
      const auto found = plan->find(&output_);
      if (found == plan->end() || found->second.captures_ == nullptr) return;
    }
    for_each_leaving(gradients, [](const at::Tensor& gradient, const at::Tensor&, const Cell& cell) {
      seal(gradient, level_of(cell));
    });
  }

  Node& output_;  // whose hook this is
};

// Levels of several threads may share a leaf.
std::mutex watching;

// See Note [Seals are hooks on the target]
void add_seals(Node& target) {
  const std::lock_guard guard(watching);
  auto& hooks = target.tensor_pre_hooks();
  if (hooks.empty() || !is_seal(hooks.back())) hooks.push_back(std::make_unique<Seal>(target));
  if (!is_seal(hooks.front())) hooks.insert(hooks.begin(), std::make_unique<Seal>(target));
}

// See Note [A hook does not touch the hooks of its node]
void watch(const decltype(Edge::function)& target) {
  if (target.get() == in_hook_of) {
    torch::autograd::Engine::get_default_engine().queue_callback([target] { add_seals(*target); });
  } else {
    add_seals(*target);
  }
}

void watch_again(const std::vector<at::Tensor>& leaves) {
  for (const at::Tensor& leaf : leaves) {
    auto node = torch::autograd::impl::try_get_grad_accumulator(leaf);
    // A part of the graph may still have to be made: by torch.utils.checkpoint, reentrant.
    if (!node && has_hooks(leaf)) node = torch::autograd::impl::grad_accumulator(leaf);
    if (node) watch(node);
  }
}

// On the node of an output: where a backward begins that enters the level.
class EntryHook final : public FunctionPreHook {
 public:
  EntryHook(std::shared_ptr<LevelHandle> level, std::shared_ptr<WatchedLeaves> leaves)
      : level_(std::move(level)), leaves_(std::move(leaves)) {}

  variable_list operator()(const variable_list& gradients) override {
    watch_again(watched_leaves());
    watch_end_of_backward();
    return gradients;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "compiled autograd traces a backward that comes to what remat(f) has returned, and no level sees "
        "what it runs. Leave torch._dynamo.config.compiled_autograd off for this backward.");
  }
  [[nodiscard]] const Level& level() const { return level_->level(); }

 private:
  // See Note [What is stored away outlives what it was made of]
  void watch_end_of_backward() const {
    Level& level = level_->level();
    if (level.active || torch::autograd::get_current_graph_task_keep_graph()) return;
    {
      const DomainLock lock(level.domain);
      level.tensor_domain().savers.note_backward(level.tensor_domain());
    }
    const bool makes_another = c10::GradMode::is_enabled();
    torch::autograd::Engine::get_default_engine().queue_callback([level = level_, makes_another] {
      hand_over(level->level(), /*sealed=*/false);
      if (!makes_another) bring_survivors_back(level->level());
    });
  }

  // Others may add to them meanwhile.
  std::vector<at::Tensor> watched_leaves() const {
    std::vector<at::Tensor> leaves;
    const DomainLock lock(level_->level().domain);
    leaves.reserve(leaves_->size());
    for (const auto& [impl, weak] : *leaves_) {
      if (auto strong = weak.lock()) leaves.emplace_back(std::move(strong));
    }
    return leaves;
  }

  std::shared_ptr<LevelHandle> level_;
  std::shared_ptr<WatchedLeaves> leaves_;
};

bool is_entry(const std::unique_ptr<FunctionPreHook>& hook, const Level& level) {
  return typeid(*hook) == typeid(EntryHook) && &static_cast<const EntryHook&>(*hook).level() == &level;
}

// Note [Reading a graph must not change it]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Tensor::grad_fn() makes a new node for a view whose base was written since. Made here, as `f`
// returns, it would have a lower number than the one the program makes when it uses the view, the
// backward would run in another order, and sums would differ in their last bits. The node to be made
// will lead to the base's; so that is where the walk starts for such a view.
Node* root_of(const at::Tensor& tensor) {
  auto* view = torch::autograd::impl::get_view_autograd_meta(tensor);
  if (view != nullptr && view->has_bw_view() && !tensor.is_inference() &&
      view->get_attr_version() != tensor._version()) {
    return root_of(view->get_backward_view().base_);
  }
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta == nullptr ? nullptr : meta->grad_fn_.get();
}

}  // namespace

void remember_leaf(const at::Tensor& leaf, WatchedLeaves& leaves) {
  // A weak reference keeps a tensor from being destroyed, and with it its handle and our lineage;
  // or, if it is a wrapper of functorch's, the tensor inside.
  const at::Tensor inner = innermost(leaf);
  if (!inner.is_same(leaf) || has_level_key(*inner.unsafeGetTensorImpl())) return;
  leaves.try_emplace(leaf.unsafeGetTensorImpl(), leaf.getIntrusivePtr());
}

void cut_graph(const at::Tensor& tensor, Level& level) {
  using torch::autograd::Node;
  Node* root = root_of(tensor);  // See Note [Reading a graph must not change it]
  const bool has_own_hooks = root == nullptr && is_made_with_hooks(tensor);
  if (root == nullptr && !has_own_hooks) return;
  const DomainLock lock(level.domain);
  if (root != nullptr && !in_region(Birth(*root), level)) return;
  const Savers& savers = level.tensor_domain().savers;
  auto leaves = level.watched_leaves.lock();
  if (!leaves) level.watched_leaves = leaves = std::make_shared<WatchedLeaves>();
  const auto handle = std::make_shared<LevelHandle>(level);
  if (has_own_hooks) {
    govern_hooks(tensor, handle, std::make_unique<EntryHook>(handle, leaves));
    return;
  }
  std::vector<Node*> todo;
  const auto visit = [&](Node& node) {
    if (!govern(node, handle)) return;
    level.graph_leaves = level.graph_leaves || !savers.has_freed(node);
    todo.push_back(&node);
  };
  visit(*root);
  const auto& hooks = root->pre_hooks();
  if (std::none_of(hooks.begin(), hooks.end(), [&](const auto& hook) { return is_entry(hook, level); })) {
    root->add_tensor_pre_hook(std::make_unique<OutputHook>(*root));
    root->add_pre_hook(std::make_unique<EntryHook>(handle, leaves));
  }
  while (!todo.empty()) {
    Node& node = *todo.back();
    todo.pop_back();
    for (const Edge& edge : node.next_edges()) {
      if (!edge.is_valid()) continue;
      if (in_region(Birth(*edge.function), level)) {
        visit(*edge.function);
      } else {
        watch(edge.function);  // See Note [Seals are hooks on the target]
        const auto* leaf =
            dynamic_cast<const torch::autograd::AccumulateGrad*>(edge.function.get());
        if (leaf == nullptr || !leaf->variable.defined()) continue;
        remember_leaf(leaf->variable, *leaves);
        if (is_made_with_hooks(leaf->variable)) govern_hooks(leaf->variable, handle);
      }
    }
  }
}

}  // namespace rematfn
