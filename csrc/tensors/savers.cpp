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
#include <cstddef>
#include <limits>
#include <type_traits>

#include "tensors/level_tensor.h"

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

// The backward that this thread is in. Where it begins can be asked for nowhere. torch hands out the
// nodes of its graph by a pointer to a member of the GraphTask, which is found from there by
// the offset of the member. Another name or type does not compile. Were the pointer one to a copy, what
// a backward has freed would not be known: tests/levels/test_escapes.py fails then.
const GraphTask& current_backward() {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
  constexpr std::size_t offset = offsetof(GraphTask, nodes_in_graph_);
#pragma GCC diagnostic pop
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  static_assert(std::is_same_v<decltype(nodes), const decltype(GraphTask::nodes_in_graph_)*>);
  return *reinterpret_cast<const GraphTask*>(reinterpret_cast<const char*>(nodes) - offset);
}

// Whether what is made now may be what a hook gives to be saved.
bool is_packing() { return !at::SavedTensorDefaultHooks::get_tls_state().stack.empty(); }

}  // namespace

Savers::Savers()
    : base_(at::sequence_number::peek()),
      thread_(at::RecordFunction::currentThreadId()) {}

// See Note [What autograd may have saved]
std::uint32_t Savers::now(TensorDomain& domain, std::uint64_t thread) {
  const bool records = c10::GradMode::is_enabled();
  if (thread != thread_) [[unlikely]] {
    return records || torch::autograd::get_current_graph_task_id() < 0 ? kAnybody : 0;  // Rule 2
  }
  const std::uint32_t latest = latest_node();
  if (records) return seen_ = latest;  // Rule 4
  see_backward(domain, latest);
  if (latest != seen_ || is_packing()) [[unlikely]] return latest;
  return 0;  // Rule 1
}

std::uint32_t Savers::latest_node() const {
  const std::uint64_t made = at::sequence_number::peek() - base_;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(made, kAnybody));
}

void Savers::note_backward(TensorDomain& domain) {
  if (at::RecordFunction::currentThreadId() == thread_) see_backward(domain, latest_node());
}

void Savers::see_backward(TensorDomain& domain, std::uint32_t latest) {
  const int backward = torch::autograd::get_current_graph_task_id();
  if (backward == backward_) [[likely]] return;
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
  const auto ended = [weak = domain.weak_from_this(), numbers = std::move(numbers), id] {
    const auto owner = std::static_pointer_cast<TensorDomain>(weak.lock());
    if (!owner) return;
    const DomainLock lock(owner);
    owner->savers.note_freed(numbers);
    owner->savers.noted_.erase(id);
  };
  torch::autograd::Engine::get_default_engine().queue_callback(ended);
}

std::uint32_t Savers::number_of(const GraphNode& node) const {
  if (node.thread_id() != thread_ || node.sequence_nr() < base_) return 0;
  const std::uint64_t number = node.sequence_nr() - base_ + 1;
  return number < kAnybody ? static_cast<std::uint32_t>(number) : 0;
}

void Savers::note_freed(const std::vector<std::uint32_t>& numbers) {
  for (const std::uint32_t number : numbers) {
    if (number >= freed_.size()) freed_.resize(number + std::size_t{1});
    freed_[number] = true;
  }
}

bool Savers::have_freed(const NodeRange& nodes) const {
  if (nodes.first == 0) return true;
  if (nodes.last >= freed_.size()) return false;
  const auto end = freed_.begin() + nodes.last + 1;
  return std::find(freed_.begin() + nodes.first, end, false) == end;
}

bool Savers::has_freed(const GraphNode& node) const {
  const std::uint32_t number = number_of(node);
  return number > 0 && have_freed({number, number});
}

}  // namespace rematfn
