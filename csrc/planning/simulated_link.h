// SPDX-License-Identifier: Apache-2.0
//
// simulated_link.h: a link of the simulator. Each direction carries one copy after the other, and, where
// they share it, returns go first.
//
// The time that passes is that of the program, of replays, and of waiting.

#pragma once

#include <unordered_map>
#include <vector>

#include "engine/link.h"
#include "engine/lineage.h"

namespace rematfn {

class SimulatedLink final : public Link {
 public:
  // `room`: bytes that there is room for at the other end.
  SimulatedLink(Domain& domain, const LinkFigures& figures, std::size_t room,
                std::size_t values);

  // By value: what has gone over it.
  [[nodiscard]] const std::vector<bool>& moved() const { return moved_; }

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
  [[nodiscard]] bool take_copy(Version& version, Way& from) override;
  [[nodiscard]] Place leave(Version& version) override;
  [[nodiscard]] Place bring_back(Version& version) override;
  [[nodiscard]] bool has_arrived(const Version& version) const override;
  [[nodiscard]] Place wait(Version& version) override;
  void turn_back(Version&) override {}
  void discard(Version& version) override;

 private:
  [[nodiscard]] LinkFigures figures() const override { return figures_; }
  [[nodiscard]] std::size_t queued_in() const override;
  [[nodiscard]] double now() const;
  void slow_down(double taken);

  const LinkFigures figures_;
  const std::size_t room_;
  std::size_t held_ = 0;
  double out_free_ = 0;  // when it will have carried all that it was given
  double in_free_ = 0;
  std::unordered_map<const Version*, double> arrives_;
  std::vector<bool> moved_;
};

}  // namespace rematfn
