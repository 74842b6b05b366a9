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
  const double price = ledger_.observers.guide ? ledger_.observers.guide->plan().link_price : 1;
  return kOperatorCost + price * time_in(version.nbytes);
}

bool Link::is_due(const Version& version, double until) const { return until <= lead(version); }

// What goes early is not to be due at once.
double Link::pays_after(const Version& version) const {
  if (version.nbytes < kWorthMoving) return kNever;
  return 2 * (lead(version) + time_out(version.nbytes));
}

// So long before it is read its return begins.
double Link::lead(const Version& version) const {
  double factor = 1;
  if (ledger_.observers.guide) {
    factor = ledger_.observers.guide->plan().lead;
    if (const Leads* leads = ledger_.observers.guide->leads()) factor *= leads->of(version.value);
  }
  return factor * time_in(version.nbytes + queued_in());
}

// See Note [What moving costs]
void Link::note_late(Trace::Id value) {
  ++ledger_.root->statistics.late_returns;
  const std::shared_ptr<Guide>& guide = ledger_.observers.guide;
  if (guide && guide->leads()) guide->leads()->note_late(value);
}

void Link::note_early(const Version& version) {
  if (is_early(version)) ledger_.observers.guide->leads()->note_early(version.value);
}

void Link::note_turned_back(const Version& version) {
  if (is_early(version)) ledger_.observers.guide->leads()->note_turned_back(version.value);
}

bool Link::is_early(const Version& version) const {
  if (!ledger_.observers.guide || !ledger_.observers.guide->leads() || version.next_use == kUnknown) return false;
  return version.next_use - ledger_.record_clock() > time_in(version.nbytes);
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
