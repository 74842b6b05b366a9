// SPDX-License-Identifier: Apache-2.0
//
// components.h: evicted operations in undirected components, for h_eq.

#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "engine/table.h"

namespace rematfn {

// The union-find of Kirisame et al. 2021, C.2, which cannot split: when an operation is back, its cost
// leaves the component, and its links stay.
class Components {
 public:
  void add(Operation& operation);
  void remove(Operation& operation);
  // The cost of the components that `version` lies beside.
  [[nodiscard]] double cost_around(const Version& version);

 private:
  std::uint32_t root_of(std::uint32_t component);

  std::vector<std::pair<std::uint32_t, double>> components_{{0, 0.0}};  // parent, sum of costs
};

}  // namespace rematfn
