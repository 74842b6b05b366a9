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

}  // namespace rematfn
