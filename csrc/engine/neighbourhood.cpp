// SPDX-License-Identifier: Apache-2.0
//
// neighbourhood.cpp: the part of Domain that walks the graph around a version, for its score.

#include <algorithm>

#include "engine/domain.h"

namespace rematfn {
namespace {

// Of the two, `dependent` was computed from `version`.
bool is_replayed_from(const Version& version, const Version& dependent) {
  return !dependent.resident || version.kept;
}

}  // namespace

// Goes on to the operations that read `version`, if the walk has not been there.
// See Note [Closure walks are capped]
void Domain::walk_readers(const Version& version, std::size_t cap) {
  for (const Input* use = version.readers; use != nullptr && walk_.size() < cap; use = use->next) {
    if (use->reader->mark == mark_) continue;
    use->reader->mark = mark_;
    walk_.push_back(use->reader);
  }
}

double Domain::neighbourhood(const Version& version, ScoreKind kind) {
  if (!version.producer) return 0;
  if (kind == ScoreKind::kEq) {
    double sum = 0;
    std::vector<std::uint32_t> seen;
    const auto visit = [&](const Operation* operation) {
      if (operation == nullptr || operation->component == 0) return;
      const std::uint32_t root = component_root(operation->component);
      if (std::find(seen.begin(), seen.end(), root) != seen.end()) return;
      seen.push_back(root);
      sum += components_[root].second;
    };
    for (const Input& input : version.producer->inputs) visit(input.version->producer.get());
    for (const Input* use = version.readers; use != nullptr; use = use->next) visit(use->reader);
    return sum;
  }
  ++mark_;
  double sum = 0;
  const std::size_t cap = kind == ScoreKind::kDtr ? kNoSlot : kWalkCap;
  walk_.clear();
  version.producer->mark = mark_;
  const auto push_ancestors = [&](const Operation& operation) {
    for (const Input& input : operation.inputs) {
      Operation* producer = input.version->producer.get();
      if (input.version->resident || producer->mark == mark_) continue;
      producer->mark = mark_;
      sum += producer->cost;
      walk_.push_back(producer);
    }
  };
  push_ancestors(*version.producer);
  for (std::size_t i = 0; i < walk_.size() && i < cap; ++i) push_ancestors(*walk_[i]);
  if (kind != ScoreKind::kDtr) return sum;
  // What cannot be had back without this version: the descendants already evicted.
  walk_.clear();
  const auto push_descendants = [&](const Version& v) {
    for (const Input* use = v.readers; use != nullptr; use = use->next) {
      if (use->reader->mark == mark_) continue;
      const auto& outputs = use->reader->outputs;
      if (std::none_of(outputs.begin(), outputs.end(),
                       [](const Version* o) { return o != nullptr && !o->resident; })) {
        continue;
      }
      use->reader->mark = mark_;
      sum += use->reader->cost;
      walk_.push_back(use->reader);
    }
  };
  push_descendants(version);
  for (std::size_t i = 0; i < walk_.size(); ++i) {
    for (const Version* output : walk_[i]->outputs) {
      if (output != nullptr && !output->resident) push_descendants(*output);
    }
  }
  return sum;
}

// Whether `visit` says true of one of the values that were computed from `version`, by operators that
// read it or what is evicted of their results. See Note [Closure walks are capped]
template <class Visit>
bool Domain::is_any_dependent(const Version& version, std::size_t cap, Visit visit) {
  ++mark_;
  walk_.clear();
  walk_readers(version, cap);
  for (std::size_t i = 0; i < walk_.size(); ++i) {
    for (const Version* output : walk_[i]->outputs) {
      if (output == nullptr) continue;
      if (visit(*output)) return true;
      if (!output->resident) walk_readers(*output, cap);
    }
  }
  return false;
}

double Domain::next_use(const Version& version) {
  if (version.next_use == kUnknown) return kUnknown;
  double next = version.next_use;
  is_any_dependent(version, kWalkCap, [&](const Version& v) {
    if (is_replayed_from(version, v)) next = std::min(next, v.next_use);
    return false;
  });
  return next;
}

// Whether the program reads `version` again, or something evicted that it takes `version` to replay.
bool Domain::is_asked_for(const Version& version) {
  if (version.next_use != kNever) return version.next_use != kUnknown;
  return is_any_dependent(version, kWalkCap, [&](const Version& v) {
    return is_replayed_from(version, v) && v.next_use != kNever;
  });
}

// A version's bytes come or go: the next use of what it is replayed from changes with that, if it
// will be asked for at all. Most that leave will not: the program has dropped them.
void Domain::mark_sources_stale(const Version& version, bool came_back) {
  if (!any_refreshed_ || !version.producer || !is_asked_for(version)) return;
  ++mark_;
  walk_.assign(1, version.producer.get());
  for (std::size_t i = 0; i < walk_.size(); ++i) {
    for (const Input& input : walk_[i]->inputs) {
      const Version& source = *input.version;
      if (source.slot != kNoSlot) mark_stale(source, came_back);
      Operation* producer = source.producer.get();
      if (source.resident || producer->mark == mark_ || walk_.size() >= kWalkCap) continue;
      producer->mark = mark_;
      walk_.push_back(producer);
    }
  }
}

void Domain::mark_dependents_stale(const Version& version, bool came_back) {
  if (!any_refreshed_) return;
  is_any_dependent(version, guide ? kGuidedMarkCap : kWalkCap, [&](const Version& v) {
    if (v.resident && v.slot != kNoSlot) mark_stale(v, came_back);
    return false;
  });
}

std::uint32_t Domain::component_root(std::uint32_t component) {
  while (components_[component].first != component) {
    components_[component].first = components_[components_[component].first].first;
    component = components_[component].first;
  }
  return component;
}

void Domain::join_component(Operation& operation) {
  if (operation.component != 0) return;
  auto root = static_cast<std::uint32_t>(components_.size());
  components_.emplace_back(root, operation.cost);
  operation.component = root;
  const auto merge = [&](const Operation* neighbour) {
    if (neighbour == nullptr || neighbour->component == 0) return;
    const std::uint32_t other = component_root(neighbour->component);
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

// Union-find cannot split: the cost leaves the component, its links stay (Kirisame 2021, C.2).
void Domain::leave_component(Operation& operation) {
  if (operation.component == 0) return;
  components_[component_root(operation.component)].second -= operation.cost;
  operation.component = 0;
}

}  // namespace rematfn
