// SPDX-License-Identifier: Apache-2.0
#include "planning/simulated_link.h"

#include <algorithm>
#include <tuple>

#include "engine/domain.h"

namespace rematfn {

SimulatedLink::SimulatedLink(Domain& domain, const LinkFigures& figures, std::size_t room,
                             std::size_t values)
    : Link(domain), figures_(figures), room_(room), moved_(values) {}

double SimulatedLink::now() const {
  return ledger_.clock + ledger_.spent();
}

// Whoever computes meanwhile takes longer.
void SimulatedLink::slow_down(double taken) {
  ledger_.root->statistics.waited += figures_.drag * taken;
}

Place SimulatedLink::leave(Version& version) {
  held_ += version.nbytes;
  const double taken = time_out(version.nbytes);
  if (version.value != kNoValue) moved_[version.value] = true;
  if (figures_.packs) {
    ledger_.root->statistics.waited += taken;
    return Place::kAway;
  }
  slow_down(taken);
  out_free_ = std::max(out_free_, now()) + taken;
  arrives_[&version] = out_free_;
  return Place::kLeaving;
}

bool SimulatedLink::take_copy(Version& version, Way& from) {
  from.discard(version);
  std::ignore = leave(version);
  ledger_.root->statistics.waited += std::max(out_free_ - now(), 0.0);
  return true;
}

Place SimulatedLink::bring_back(Version& version) {
  const double taken = time_in(version.nbytes);
  if (figures_.packs) {
    ledger_.root->statistics.waited += taken;
    discard(version);
    return Place::kHere;
  }
  slow_down(taken);
  in_free_ = std::max(in_free_, now()) + taken;
  if (figures_.one_way_at_a_time) out_free_ = std::max(out_free_, now()) + taken;
  arrives_[&version] = in_free_;
  return Place::kComing;
}

bool SimulatedLink::has_arrived(const Version& version) const {
  return arrives_.at(&version) <= now();
}

Place SimulatedLink::wait(Version& version) {
  const double late = arrives_.at(&version) - now();
  if (late > 0) ledger_.root->statistics.waited += late;
  if (version.place() == Place::kLeaving) return Place::kAway;
  if (late > 0) ++ledger_.root->statistics.late_returns;
  discard(version);
  return Place::kHere;
}

void SimulatedLink::discard(Version& version) {
  held_ -= version.nbytes;
  arrives_.erase(&version);
}

std::size_t SimulatedLink::queued_in() const {
  const double left = std::max(in_free_ - now(), 0.0);
  return figures_.per_byte_in > 0 ? static_cast<std::size_t>(left / figures_.per_byte_in) : 0;
}

}  // namespace rematfn
