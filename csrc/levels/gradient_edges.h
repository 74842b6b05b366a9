// SPDX-License-Identifier: Apache-2.0
//
// gradient_edges.h: hooks on the edges of the autograd graph that leave a level's region, and on the nodes
// where its backward begins.

#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "levels/level.h"

namespace rematfn {

// Watches the edges by which the graph behind `tensor` leaves the level's region.
// See Note [What leaves is sealed]
void cut_graph(const at::Tensor& tensor, Level& level);
// A backward that enters the level looks at the hooks of `leaf` again. The level's domain is locked.
void remember_leaf(const at::Tensor& leaf, WatchedLeaves& leaves);

// The level in whose region the node lies that a backward runs on this thread, which keeps it alive;
// null if there is none. See Note [The operators of a node are its level's]
[[nodiscard]] Level* level_of_running_node();

}  // namespace rematfn
