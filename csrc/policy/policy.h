// SPDX-License-Identifier: Apache-2.0
//
// policy.h: what a user says about what goes, as one value.
//
// It is the same from Python to the tables: whoever asks for a policy passes it whole, and nothing in
// it changes while a program runs. What does is a ScoreContext. The defaults of a policy are those of
// its members here; Python reads them from here.

#pragma once

#include <functional>
#include <string_view>

#include "policy/eviction.h"
#include "policy/keeping.h"

namespace rematfn {

// What a score written by the user is shown of a candidate.
struct Considered {
  double nbytes;
  double cost;
  double ancestors;    // cost of those that are evicted
  double descendants;  // the same
  double age;
  double next_use;  // time until then, kNever or kUnknown
  bool consumed;
  std::string_view producer;
};
// May throw.
using CustomScore = std::function<double(const Considered&)>;

struct Policy {
  Score score{};
  Keeping keeping{};
  CustomScore custom_score{};                  // if set, scores instead of `score`
  bool evict_everything = false;  // after every operator
};

}  // namespace rematfn
