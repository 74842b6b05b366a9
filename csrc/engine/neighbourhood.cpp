// SPDX-License-Identifier: Apache-2.0
#include "engine/neighbourhood.h"

#include <algorithm>
#include <utility>

namespace rematfn {
namespace {

// Of the two, `dependent` was computed from `version`.
bool is_replayed_from(const Version& version, const Version& dependent) {
  return dependent.must_be_replayed() || version.kept;
}

}  // namespace

bool is_wanted(const Version& version) {
  if (version.pending > 0 || version.has_tensor) return true;
  const auto is_evicted = [](const Version* v) { return v != nullptr && is_away(v); };
  for (const Input* use = version.readers; use != nullptr; use = use->next) {
    if (std::ranges::any_of(use->reader->outputs, is_evicted)) return true;
  }
  return false;
}

std::size_t bytes_of(const std::vector<Version*>& versions,
                     c10::function_ref<bool(const Version*)> counts) {
  std::size_t sum = 0;
  for (const Version* version : versions) sum += counts(version) ? version->nbytes : 0;
  return sum;
}

// See Note [Closure walks are capped]
double Neighbourhood::ancestors(const Version& version, double times_dropped) {
  any_asked_ = true;
  if (!version.producer) return 0;
  double sum = 0;
  Walk walk(walks_);
  walk.mark(*version.producer);
  const auto visit = [&](const Operation& operation) {
    for (const Input& input : operation.inputs) {
      Operation* producer = input.version->producer.get();
      if (!input.version->must_be_replayed() || !walk.visit(*producer)) continue;
      sum += (input.version->has_tensor ? 1 : times_dropped) * producer->cost;
    }
  };
  visit(*version.producer);
  for (std::size_t i = 0; i < walk.size() && i < kWalkCap; ++i) visit(walk[i]);
  return sum;
}

// Whether `visit` says true of one of the values that were computed from `version`, by operators that
// read it or what is evicted of their results. See Note [Closure walks are capped]
template <class Visit>
bool Neighbourhood::is_any_dependent(const Version& version, std::size_t cap, Visit visit) {
  Walk walk(walks_);
  walk.visit_readers(version, cap);
  for (std::size_t i = 0; i < walk.size(); ++i) {
    for (const Version* output : walk[i].outputs) {
      if (output == nullptr) continue;
      if (visit(*output)) return true;
      if (output->must_be_replayed()) walk.visit_readers(*output, cap);
    }
  }
  return false;
}

double Neighbourhood::descendants(const Version& version) {
  double sum = 0;
  const Operation* counted = nullptr;  // the outputs of one come one after the other
  is_any_dependent(version, kWalkCap, [&](const Version& v) {
    const Operation* producer = v.producer.get();
    if (v.must_be_replayed() && std::exchange(counted, producer) != producer) sum += producer->cost;
    return false;
  });
  return sum;
}

std::optional<std::vector<Version*>> Neighbourhood::dependents(const Version& version,
                                                               std::size_t cap) {
  std::vector<Version*> found;
  Walk walk(walks_);
  walk.visit_readers(version, cap);
  for (std::size_t i = 0; i < walk.size(); ++i) {
    if (walk.size() >= cap) return {};
    for (Version* output : walk[i].outputs) {
      if (output == nullptr) continue;
      if (output->has_tensor) {
        found.push_back(output);
      } else {
        walk.visit_readers(*output, cap);
      }
    }
  }
  return found;
}

double Neighbourhood::next_use(const Version& version) {
  any_asked_ = true;
  if (version.next_use == kUnknown) return kUnknown;
  double next = version.next_use;
  is_any_dependent(version, kWalkCap, [&](const Version& v) {
    if (is_replayed_from(version, v)) next = std::min(next, v.next_use);
    return false;
  });
  return next;
}

// Whether the program reads `version` again, or something evicted that it takes `version` to replay.
bool Neighbourhood::is_asked_for(const Version& version) {
  if (version.next_use != kNever) return version.next_use != kUnknown;
  return is_any_dependent(version, kWalkCap, [&](const Version& v) {
    return is_replayed_from(version, v) && v.next_use != kNever;
  });
}

// A version's bytes come or go: the next use of what it is replayed from changes with that, if it
// will be asked for at all. Most that leave will not: the program has dropped them.
void Neighbourhood::make_sources_stale(const Version& version, bool came_back) {
  if (!version.producer || !is_asked_for(version)) return;
  Walk walk(walks_);
  walk.visit(*version.producer);
  for (std::size_t i = 0; i < walk.size(); ++i) {
    for (const Input& input : walk[i].inputs) {
      const Version& source = *input.version;
      if (source.is_candidate()) [[unlikely]] make_stale(source, came_back);
      if (source.must_be_replayed() && walk.size() < kWalkCap) walk.visit(*source.producer);
    }
  }
}

void Neighbourhood::make_dependents_stale(const Version& version, bool came_back,
                                          bool is_guided) {
  is_any_dependent(version, is_guided ? kGuidedWalkCap : kWalkCap, [&](const Version& v) {
    if (v.is_candidate()) make_stale(v, came_back);
    return false;
  });
}

void Neighbourhood::note_change(const Version& version, bool came_back, bool is_guided) {
  if (!any_asked_) return;
  make_dependents_stale(version, came_back, is_guided);
  make_sources_stale(version, came_back);
}

}  // namespace rematfn
