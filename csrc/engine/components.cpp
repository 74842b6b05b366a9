// SPDX-License-Identifier: Apache-2.0
#include "engine/components.h"

#include <algorithm>

namespace rematfn {

std::uint32_t Components::root_of(std::uint32_t component) {
  while (components_[component].first != component) {
    components_[component].first = components_[components_[component].first].first;
    component = components_[component].first;
  }
  return component;
}

double Components::cost_around(const Version& version) {
  double sum = 0;
  std::vector<std::uint32_t> seen;
  const auto visit = [&](const Operation* operation) {
    if (operation == nullptr || operation->component == 0) return;
    const std::uint32_t root = root_of(operation->component);
    if (std::find(seen.begin(), seen.end(), root) != seen.end()) return;
    seen.push_back(root);
    sum += components_[root].second;
  };
  for (const Input& input : version.producer->inputs) visit(input.version->producer.get());
  for (const Input* use = version.readers; use != nullptr; use = use->next) visit(use->reader);
  return sum;
}

void Components::add(Operation& operation) {
  if (operation.component != 0) return;
  auto root = static_cast<std::uint32_t>(components_.size());
  components_.emplace_back(root, operation.cost);
  operation.component = root;
  const auto merge = [&](const Operation* neighbour) {
    if (neighbour == nullptr || neighbour->component == 0) return;
    const std::uint32_t other = root_of(neighbour->component);
    if (other == root) return;
    components_[other].second += components_[root].second;
    components_[root].first = other;
    root = other;
  };
  for (const Input& input : operation.inputs) merge(input.version->producer.get());
  for (const Version* output : operation.outputs) {
    if (output == nullptr) continue;
    for (const Input* use = output->readers; use != nullptr; use = use->next) merge(use->reader);
  }
}

void Components::remove(Operation& operation) {
  if (operation.component == 0) return;
  components_[root_of(operation.component)].second -= operation.cost;
  operation.component = 0;
}

}  // namespace rematfn
