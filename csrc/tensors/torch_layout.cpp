// SPDX-License-Identifier: Apache-2.0
#include "tensors/torch_layout.h"

#include <torch/csrc/autograd/graph_task.h>

#include <cstddef>

namespace rematfn {

const torch::autograd::GraphTask& current_backward() {
  using torch::autograd::GraphTask;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
  constexpr std::size_t offset = offsetof(GraphTask, nodes_in_graph_);
#pragma GCC diagnostic pop
  const decltype(GraphTask::nodes_in_graph_)* nodes =
      torch::autograd::get_current_graph_task_nodes_in_graph();
  return *reinterpret_cast<const GraphTask*>(reinterpret_cast<const char*>(nodes) - offset);
}

}  // namespace rematfn
