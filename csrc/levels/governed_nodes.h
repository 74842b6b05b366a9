// SPDX-License-Identifier: Apache-2.0
//
// governed_nodes.h: whose the operators are that a node of autograd's runs, and its hooks.
//
// Note [The operators of a node are its level's]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A backward after `f` reads much that is no level tensor: the gradient that autograd feeds to an
// output, for a mean as large as its input; the cosine of an argument; the zeros that a formula
// starts from; all of matrix_exp's, which works on a block matrix of its own; parameters, where a hook
// or an autograd.Function computes anew. So each node of the region that a backward can reach from
// outside has a hook that lets its operators come to us, and says whose they are. The engine restores
// the thread's state for each node. What is allocated there beside operators counts for that level too,
// until it is freed, or until the gradient leaves (SealHook).
//   1. A node whose graph nested levels share has a hook of each; the innermost governs.
//   2. Hooks that the node has when `f` returns are part of `f`: ours comes before them. So do those of
//      a leaf that was made in `f`. What registers later, on a result, is the caller's.
//   3. A backward that runs within a node begins with that node's state, on whatever thread it runs. Its
//      own nodes have no hook of ours: they were made just now, and belong where that node does. So do
//      the gradients that it gives back, of leaves from outside too: what is computed of them is the
//      level's, and if they were sealed, its lineage would hold them all. Where it accumulates one,
//      AccumulateGrad is nobody's, and the gradient has left.
//   4. Neither is a leaf's own gradient the level's: the hooks of a leaf are, and not what comes after.
//   5. In `f` itself nodes have no hook of ours yet, and need none: its thread has a stack of levels. But an
//      accelerator's nodes run on a thread of autograd's, which has none. So where there is an accelerator, a
//      level that runs lies in its thread's state as well, which the engine takes along.

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <cstdint>
#include <limits>
#include <memory>

#include "levels/level.h"

namespace rematfn {

// AccumulateGrad nodes have the greatest number of all, so that they run as early as they can. They
// are in nobody's region, whoever made their leaf.
inline constexpr std::uint64_t kAccumulator = std::numeric_limits<std::uint64_t>::max();

// A hook of ours, which leaves gradients as they are.
class WatchingHook : public torch::autograd::FunctionPreHook {
 public:
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) final {
    see(gradients);
    return gradients;
  }
  // Nothing for compiled autograd to trace: what it runs are no level tensors.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const final {}

 private:
  virtual void see(const torch::autograd::variable_list& gradients) = 0;
};

// The node that a backward runs on this thread, which lives as long as it runs; or null.
[[nodiscard]] inline const torch::autograd::Node* running_node() {
  return torch::autograd::get_current_node().get();
}
// The level whose the operators are of that node; null if there is none.
[[nodiscard]] Level* level_of_running_node(const torch::autograd::Node* node);
// The level whose this thread's operators are: the innermost active one, or else that of the node.
[[nodiscard]] inline Level* level_of_thread(const torch::autograd::Node* node) {
  Level* level = current_level();
  return level != nullptr ? level : level_of_running_node(node);
}
// Whether a node of some level has begun the running backward; of `by` or of one inside it, if given.
[[nodiscard]] bool is_backward_governed(const Level* by = nullptr);

// While it runs, the operators of nodes that run on other threads for this one are the level's.
void govern_thread(const std::shared_ptr<LevelHandle>& level);
void leave_thread(const Level& level);

// From now on the operators of `node` are the level's, and those of the hooks that it has. False if they
// were already.
bool govern(torch::autograd::Node& node, const std::shared_ptr<LevelHandle>& level);
// The same for the hooks that a leaf has, which begin with `first`.
void govern_hooks(const at::Tensor& leaf, const std::shared_ptr<LevelHandle>& level,
                  std::unique_ptr<torch::autograd::FunctionPreHook> first = nullptr);

}  // namespace rematfn
