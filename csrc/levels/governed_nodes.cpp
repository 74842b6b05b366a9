// SPDX-License-Identifier: Apache-2.0
#include "levels/governed_nodes.h"

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <typeinfo>
#include <utility>
#include <vector>

#include "tensors/thread_keys.h"
#include "tensors/torch_compat.h"

namespace rematfn {
namespace {

using torch::autograd::FunctionPreHook;
using GraphNode = torch::autograd::Node;
using torch::autograd::PostAccumulateGradHook;
using torch::autograd::variable_list;

// Lies in the state of a thread. See Note [The operators of a node are its level's], Rule 3
struct Governor final : c10::DebugInfoBase {
  Governor(std::shared_ptr<LevelHandle> by, const GraphNode* of) : level(std::move(by)), node(of) {}

  const std::shared_ptr<LevelHandle> level;  // null: nobody's, from here on
  const GraphNode* const node;
};

const Governor* governor() {
  return static_cast<const Governor*>(c10::ThreadLocalDebugInfo::get(own_slot()));
}

void begin_to_govern(const std::shared_ptr<LevelHandle>& level) {
  if (current_level() != nullptr) return;
  const GraphNode* node = running_node();
  const Governor* now = governor();
  if (now != nullptr && now->node == node && now->level &&
      now->level->level().depth >= level->level().depth) {
    return;  // Rule 1
  }
  see_operators();
  c10::ThreadLocalDebugInfo::_push(own_slot(), std::make_shared<Governor>(level, node));
}

// See Note [The operators of a node are its level's], Rule 4
void end_to_govern() {
  const GraphNode* node = running_node();
  c10::ThreadLocalDebugInfo::_push(own_slot(), std::make_shared<Governor>(nullptr, node));
}

// What it does leaves the gradients as they are.
class Hook final : public FunctionPreHook {
 public:
  Hook(HookAction action, const void* own_mark) : mark(own_mark), action_(std::move(action)) {}

  variable_list operator()(const variable_list& gradients) override {
    action_(gradients);
    return gradients;
  }
  // Nothing for compiled autograd to trace: what it runs are no level tensors.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

  const void* const mark;

 private:
  const HookAction action_;
};

std::unique_ptr<FunctionPreHook> make_governing_hook(const std::shared_ptr<LevelHandle>& level) {
  const auto begin = [level](const variable_list&) { begin_to_govern(level); };
  return make_hook(begin, &level->level());
}

// Around those of a leaf that run when its gradient is there.
class GovernedPostHook final : public PostAccumulateGradHook {
 public:
  GovernedPostHook(std::shared_ptr<LevelHandle> level, std::unique_ptr<PostAccumulateGradHook> inner)
      : level_(std::move(level)), inner_(std::move(inner)) {}

  void operator()(const at::Tensor& leaf) override {
    begin_to_govern(level_);
    (*inner_)(leaf);
    end_to_govern();
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    inner_->compiled_args(args);
  }
  void apply_with_saved(at::Tensor& leaf,
                        torch::dynamo::autograd::SwapSavedVariables& saved) override {
    inner_->apply_with_saved(leaf, saved);
  }

 private:
  const std::shared_ptr<LevelHandle> level_;
  const std::unique_ptr<PostAccumulateGradHook> inner_;
};

}  // namespace

Level* level_of_running_node(const GraphNode* node) {
  if (!c10::impl::tls_is_dispatch_key_included(kLevelKey)) return nullptr;
  const Governor* now = governor();
  if (now == nullptr || !now->level) return nullptr;
  if (node == nullptr || (node->sequence_nr() == kAccumulator && node != now->node)) return nullptr;
  return &now->level->level();
}

bool is_backward_governed(const Level* by) {
  const Governor* now = governor();
  if (now == nullptr || !now->level) return false;
  if (now->node == running_node()) return false;
  return by == nullptr || is_within(&now->level->level(), *by);
}

std::unique_ptr<FunctionPreHook> make_hook(HookAction action, const void* mark) {
  return std::make_unique<Hook>(std::move(action), mark);
}

bool has_mark(const FunctionPreHook& hook, const void* mark) {
  return typeid(hook) == typeid(Hook) && static_cast<const Hook&>(hook).mark == mark;
}

void govern(GraphNode& node, const std::shared_ptr<LevelHandle>& level) {
  auto& hooks = node.tensor_pre_hooks().empty() ? node.pre_hooks() : node.tensor_pre_hooks();
  hooks.insert(hooks.begin(), make_governing_hook(level));
}

void govern_hooks(const at::Tensor& leaf, const std::shared_ptr<LevelHandle>& level,
                  std::unique_ptr<FunctionPreHook> first) {
  auto& hooks = torch::autograd::impl::hooks(leaf);
  const auto is_ours = [&](const std::unique_ptr<FunctionPreHook>& hook) {
    return has_mark(*hook, &level->level());
  };
  if (std::any_of(hooks.begin(), hooks.end(), is_ours)) return;
  if (first) hooks.insert(hooks.begin(), std::move(first));
  hooks.insert(hooks.begin(), make_governing_hook(level));
  hooks.push_back(make_hook([](const variable_list&) { end_to_govern(); }));
  if (auto& after = torch::autograd::impl::post_acc_grad_hooks(leaf)) {
    after = std::make_unique<GovernedPostHook>(level, std::move(after));
  }
}

}  // namespace rematfn
