// SPDX-License-Identifier: Apache-2.0
#include "engine/link.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <random>

namespace rematfn {
namespace {

// See Note [A version goes by a way], Rule 6
constexpr std::size_t kWorthMoving = std::size_t{1} << 16;

std::atomic<bool> costs_are_drawn{false};

double drawn_cost() {
  thread_local std::minstd_rand random{7};
  return std::exp2(-static_cast<double>(random() % 40));
}

}  // namespace

void Link::draw_costs(bool drawn) { costs_are_drawn = drawn; }

// See Note [What moving costs]
double Link::cost(const Version& version) const {
  if (costs_are_drawn.load(std::memory_order_relaxed)) return drawn_cost();
  const double both = kOperatorCost + time_out(version.nbytes) + time_in(version.nbytes);
  if (figures().packs) return both / (1 - version.packed_share);  // for each byte that it frees
  const Guide* const guide = ledger_.observers.guide.get();
  if (guide == nullptr || !guide->foresees()) return both;
  return kOperatorCost + guide->plan().link_price * time_in(version.nbytes);
}

bool Link::is_due(const Version& version, double until) const {
  return !figures().packs && until <= lead(version);
}

// What goes early is not to be due at once.
double Link::pays_after(const Version& version) const {
  if (version.nbytes < kWorthMoving) return kNever;
  return 2 * (lead(version) + time_out(version.nbytes));
}

// So long before it is read its return begins.
double Link::lead(const Version& version) const {
  const double factor = ledger_.observers.guide ? ledger_.observers.guide->plan().lead : 1;
  return factor * time_in(version.nbytes + queued_in());
}

double Link::time_out(std::size_t nbytes) const {
  const LinkFigures link = figures();
  return link.latency + static_cast<double>(nbytes) * link.per_byte_out;
}

double Link::time_in(std::size_t nbytes) const {
  const LinkFigures link = figures();
  return link.latency + static_cast<double>(nbytes) * link.per_byte_in;
}

}  // namespace rematfn
