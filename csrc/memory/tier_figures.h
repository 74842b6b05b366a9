// SPDX-License-Identifier: Apache-2.0
//
// tier_figures.h: what lies in a tier, and how fast it comes and goes.

#pragma once

#include <cstddef>
#include <string>

namespace rematfn {

// In one direction.
struct Traffic {
  std::size_t bytes = 0;
  std::size_t transfers = 0;  // whole ones
  double bandwidth = 0;       // of late, in bytes per second; 0: not known yet
  std::size_t queued = 0;     // bytes that have been asked for and are not there yet
};

struct TierFigures {
  Traffic out, in;
  std::size_t held = 0;  // in units of Slab::kAlignment
  std::size_t peak_held = 0;
  std::size_t capacity = 0;  // the budget, or what there is of it
  std::string trouble;       // why that is less, or what fails; empty if nothing has gone wrong
  bool direct = false;       // of a disk: past the page cache, as it turned out
  std::size_t pinned = 0;    // of the host: what the system gave
  double waited = 0;         // the same: seconds that kernels waited for copies, as far as known
};

}  // namespace rematfn
