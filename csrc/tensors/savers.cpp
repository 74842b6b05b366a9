// SPDX-License-Identifier: Apache-2.0
#include "tensors/savers.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "base/thread_local.h"
#include "tensors/level_tensor.h"
#include "tensors/torch_layout.h"

namespace rematfn {
namespace {

using GraphNode = torch::autograd::Node;
using torch::autograd::GraphTask;

constexpr std::uint32_t kAnybody = std::numeric_limits<std::uint32_t>::max();

template <class Visit>
void for_each_executed(const GraphTask& backward, Visit&& visit) {
  if (backward.exec_info_.empty()) {
    for (const GraphNode* node : backward.nodes_in_graph_) visit(*node);
    for (const GraphNode* node : backward.graph_roots_) visit(*node);
  } else {
    for (const auto& [node, info] : backward.exec_info_) {
      if (info.needed_) visit(*node);
    }
  }
}

// Which thread this is. To ask torch is a call, and another for its variable.
std::uint64_t this_threads_number() {
  static constinit std::atomic<std::uint64_t> latest{0};
  static REMATFN_THREAD_LOCAL std::uint64_t number = 0;
  if (number == 0) number = ++latest;
  return number;
}

// Whether what is made now may be what a hook gives to be saved.
bool is_packing() { return !at::SavedTensorDefaultHooks::get_tls_state().stack.empty(); }

}  // namespace

Savers::Savers()
    : base_(at::sequence_number::peek()),
      thread_(at::RecordFunction::currentThreadId()),
      maker_(this_threads_number()) {}

// See Note [What autograd may have saved]
std::uint32_t Savers::now(TensorDomain& domain) {
  const bool records = c10::GradMode::is_enabled();
  if (this_threads_number() != maker_) {
    return records || torch::autograd::get_current_graph_task_id() < 0 ? kAnybody : 0;  // Rule 2
  }
  const std::uint32_t latest = latest_node();
  if (records) return seen_ = latest;  // Rule 4
  see_backward(domain, latest);
  if (latest != seen_ || is_packing()) return latest;
  return 0;  // Rule 1
}

std::uint32_t Savers::latest_node() const {
  const std::uint64_t made = at::sequence_number::peek() - base_;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(made, kAnybody));
}

void Savers::note_backward(TensorDomain& domain) {
  if (this_threads_number() == maker_) see_backward(domain, latest_node());
}

void Savers::see_backward(TensorDomain& domain, std::uint32_t latest) {
  const int backward = torch::autograd::get_current_graph_task_id();
  if (backward == backward_) return;
  backward_ = backward;
  if (backward >= 0) enter_backward(domain, latest);
}

void Savers::enter_backward(TensorDomain& domain, std::uint32_t latest) {
  if (!c10::GradMode::is_enabled()) seen_ = latest;  // Rule 1
  const int id = backward_;
  const GraphTask& backward = current_backward();
  if (backward.keep_graph_ || !noted_.insert(id).second) return;
  std::vector<std::uint32_t> numbers;
  for_each_executed(backward, [&](const GraphNode& node) {
    if (const std::uint32_t number = number_of(node); number > 0) numbers.push_back(number);
  });
  // Where there are several roots, they have one more for the while.
  if (backward.graph_roots_.size() > 1 && seen_ > 0) numbers.push_back(seen_);
  const auto ended = [weak = domain.weak_from_this(), numbers = std::move(numbers), id]() mutable {
    const auto owner = std::static_pointer_cast<TensorDomain>(weak.lock());
    if (!owner) return;
    const DomainLock lock(owner);
    owner->savers.let_go(std::move(numbers));
    owner->savers.noted_.erase(id);
  };
  torch::autograd::Engine::get_default_engine().queue_callback(ended);
}

std::uint32_t Savers::number_of(const GraphNode& node) const {
  if (node.thread_id() != thread_ || node.sequence_nr() < base_) return 0;
  const std::uint64_t number = node.sequence_nr() - base_ + 1;
  return number < kAnybody ? static_cast<std::uint32_t>(number) : 0;
}

void Savers::let_go(std::vector<std::uint32_t> numbers) {
  std::sort(numbers.begin(), numbers.end());
  for (std::size_t i = 0; i < numbers.size();) {
    std::uint32_t first = numbers[i];
    std::uint32_t last = first;
    for (; i < numbers.size() && numbers[i] <= last + 1; ++i) last = numbers[i];
    auto next = let_go_.upper_bound(first);
    if (next != let_go_.begin()) {
      if (const auto before = std::prev(next); before->second + 1 >= first) next = before;
    }
    while (next != let_go_.end() && next->first <= last + 1) {
      first = std::min(first, next->first);
      last = std::max(last, next->second);
      next = let_go_.erase(next);
    }
    let_go_.emplace(first, last);
  }
}

bool Savers::have_let_go(const Version& version) const {
  if (version.first_saver == 0) return true;
  const auto next = let_go_.upper_bound(version.first_saver);
  return next != let_go_.begin() && std::prev(next)->second >= version.last_saver;
}

bool Savers::has_let_go(const GraphNode& node) const {
  const std::uint32_t number = number_of(node);
  const auto next = let_go_.upper_bound(number);
  return number > 0 && next != let_go_.begin() && std::prev(next)->second >= number;
}

}  // namespace rematfn
