// SPDX-License-Identifier: Apache-2.0
//
// simulated_link.h: a link of the simulator. Each direction carries one copy after the other, and, where
// they share it, returns go first.
//
// The time that passes is that of the program, of replays, and of waiting.

#pragma once

#include <algorithm>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "engine/domain.h"
#include "engine/link.h"

namespace rematfn {

class SimulatedLink final : public Link {
 public:
  // `room`: bytes that there is room for at the other end. `moved`: by value, what has gone over a link.
  SimulatedLink(Domain& domain, const LinkFigures& figures, std::size_t room, std::vector<bool>& moved)
      : Link(domain), figures_(figures), room_(room), moved_(moved) {}

  [[nodiscard]] bool applies(const Version& version) const override {
    return !figures_.packs || is_worth_packing(version);
  }
  [[nodiscard]] std::size_t bytes_here(const Version& version) const override {
    const double packed = static_cast<double>(version.packed_share) * static_cast<double>(version.nbytes);
    return figures_.packs ? static_cast<std::size_t>(packed) : 0;
  }
  [[nodiscard]] bool has_room(const Version& version) const override {
    return version.nbytes <= room_ - held_;
  }
  [[nodiscard]] bool takes_copies(const Version& version) const override {
    return !figures_.packs && has_room(version);
  }
  [[nodiscard]] bool take_copy(Version& version, Way& from) override {
    from.discard(version);
    std::ignore = leave(version);
    ledger_.root->statistics.waited += std::max(out_free_ - now(), 0.0);
    return true;
  }
  [[nodiscard]] Place leave(Version& version) override {
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
  [[nodiscard]] Place bring_back(Version& version) override {
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
  [[nodiscard]] bool has_arrived(const Version& version) const override {
    return arrives_.at(&version) <= now();
  }
  [[nodiscard]] Place wait(Version& version) override {
    const double late = arrives_.at(&version) - now();
    if (late > 0) ledger_.root->statistics.waited += late;
    if (version.place() == Place::kLeaving) return Place::kAway;
    if (late > 0) ++ledger_.root->statistics.late_returns;
    discard(version);
    return Place::kHere;
  }
  void turn_back(Version&) override {}
  void discard(Version& version) override {
    held_ -= version.nbytes;
    arrives_.erase(&version);
  }

 private:
  [[nodiscard]] LinkFigures figures() const override { return figures_; }
  [[nodiscard]] std::size_t queued_in() const override {
    const double left = std::max(in_free_ - now(), 0.0);
    return figures_.per_byte_in > 0 ? static_cast<std::size_t>(left / figures_.per_byte_in) : 0;
  }
  [[nodiscard]] double now() const { return ledger_.clock + ledger_.spent(); }
  // Whoever computes meanwhile takes longer.
  void slow_down(double taken) { ledger_.root->statistics.waited += figures_.drag * taken; }

  const LinkFigures figures_;
  const std::size_t room_;
  std::size_t held_ = 0;
  double out_free_ = 0;  // when it will have carried all that it was given
  double in_free_ = 0;
  std::unordered_map<const Version*, double> arrives_;
  std::vector<bool>& moved_;
};

}  // namespace rematfn
