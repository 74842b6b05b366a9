// SPDX-License-Identifier: Apache-2.0
#include "levels/governed_nodes.h"

#include <ATen/DeviceAccelerator.h>
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

class GoverningHook final : public WatchingHook {
 public:
  explicit GoverningHook(std::shared_ptr<LevelHandle> by) : level(std::move(by)) {}

  const std::shared_ptr<LevelHandle> level;

 private:
  void see(const variable_list&) override { begin_to_govern(level); }
};

bool is_governed(const std::vector<std::unique_ptr<FunctionPreHook>>& hooks, const LevelHandle& by) {
  return std::any_of(hooks.begin(), hooks.end(), [&](const std::unique_ptr<FunctionPreHook>& hook) {
    if (typeid(*hook) != typeid(GoverningHook)) return false;
    return &static_cast<const GoverningHook&>(*hook).level->level() == &by.level();
  });
}

void put_first(std::vector<std::unique_ptr<FunctionPreHook>>& hooks,
               const std::shared_ptr<LevelHandle>& level) {
  hooks.insert(hooks.begin(), std::make_unique<GoverningHook>(level));
}

// Behind those of a leaf.
class EndingHook final : public WatchingHook {
  void see(const variable_list&) override { end_to_govern(); }
};

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

 private:
  const std::shared_ptr<LevelHandle> level_;
  const std::unique_ptr<PostAccumulateGradHook> inner_;
};

}  // namespace

Level* level_of_running_node(const GraphNode* node) {
  if (!c10::impl::tls_is_dispatch_key_included(kLevelKey)) [[unlikely]] return nullptr;
  const Governor* now = governor();
  if (now == nullptr || !now->level) return nullptr;
  if (node == nullptr || (node->sequence_nr() == kAccumulator && node != now->node)) [[unlikely]] return nullptr;
  return &now->level->level();
}

// See Note [The operators of a node are its level's], Rule 5
void govern_thread(const std::shared_ptr<LevelHandle>& level) {
  if (!at::getAccelerator()) return;
  c10::ThreadLocalDebugInfo::_push(own_slot(), std::make_shared<Governor>(level, running_node()));
}

void leave_thread(const Level& level) {
  const Governor* now = governor();
  if (now == nullptr || !now->level || &now->level->level() != &level) return;
  try {
    c10::ThreadLocalDebugInfo::_pop(own_slot());
  } catch (const c10::Error&) {  // something else has come into the state in `f`, and stays
    end_to_govern();
  }
}

bool is_backward_governed(const Level* by) {
  const Governor* now = governor();
  if (now == nullptr || !now->level) return false;
  if (now->node == running_node()) return false;
  return by == nullptr || is_within(&now->level->level(), *by);
}

bool govern(GraphNode& node, const std::shared_ptr<LevelHandle>& level) {
  auto& on_tensor = node.tensor_pre_hooks();
  if (is_governed(on_tensor, *level) || is_governed(node.pre_hooks(), *level)) return false;
  put_first(on_tensor.empty() ? node.pre_hooks() : on_tensor, level);
  return true;
}

void govern_hooks(const at::Tensor& leaf, const std::shared_ptr<LevelHandle>& level,
                  std::unique_ptr<FunctionPreHook> first) {
  auto& hooks = torch::autograd::impl::hooks(leaf);
  if (is_governed(hooks, *level)) return;
  if (first) hooks.insert(hooks.begin(), std::move(first));
  put_first(hooks, level);
  hooks.push_back(std::make_unique<EndingHook>());
  if (auto& after = torch::autograd::impl::post_acc_grad_hooks(leaf)) {
    after = std::make_unique<GovernedPostHook>(level, std::move(after));
  }
}

}  // namespace rematfn
