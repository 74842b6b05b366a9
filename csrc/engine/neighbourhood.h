// SPDX-License-Identifier: Apache-2.0
//
// neighbourhood.h: what lies around a version, for its score.

#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include <c10/util/FunctionRef.h>

#include "engine/table.h"
#include "engine/walk.h"

namespace rematfn {

// Would a version just recomputed be read again, by a queued replay or by the program?
[[nodiscard]] bool is_wanted(const Version& version);

[[nodiscard]] inline bool is_away(const Version* version) { return version->must_be_replayed(); }
[[nodiscard]] inline bool goes_or_is_away(const Version* version) { return version->may_go() || is_away(version); }

// The bytes of those that count.
[[nodiscard]] std::size_t bytes_of(const std::vector<Version*>& versions,
                                   c10::function_ref<bool(const Version*)> counts);

class Neighbourhood {
 public:
  explicit Neighbourhood(Walks& walks) : walks_(walks) {}

  // What replaying its evicted ancestors costs, which would come first; so many times, of those that the
  // program does not hold.
  [[nodiscard]] double ancestors(const Version& version, double times_dropped = 1);
  // The same of its evicted descendants, which cannot be had back without it.
  [[nodiscard]] double descendants(const Version& version);
  // When the program reads `version` next, or something evicted that it takes `version` to replay.
  [[nodiscard]] double next_use(const Version& version);
  // The first of the program's own on the ways from `version`, past what is lineage alone; none where `cap`
  // operations or more lie before them.
  [[nodiscard]] std::optional<std::vector<Version*>> dependents(const Version& version, std::size_t cap);
  // `version` has gone or come back. See Note [Stale scores are too low].
  void note_change(const Version& version, bool came_back, bool is_guided);

 private:
  template <class Visit>
  bool is_any_dependent(const Version& version, std::size_t cap, Visit visit);
  [[nodiscard]] bool is_asked_for(const Version& version);
  void make_dependents_stale(const Version& version, bool came_back, bool is_guided);
  void make_sources_stale(const Version& version, bool came_back);

  Walks& walks_;
  bool any_asked_ = false;  // else all candidates are stale
};

}  // namespace rematfn
