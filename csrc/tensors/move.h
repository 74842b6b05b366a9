// SPDX-License-Identifier: Apache-2.0
//
// move.h: versions go to a tier, and come back from it.

#pragma once

#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "engine/link.h"
#include "planning/simulation.h"
#include "tensors/tier.h"

namespace rematfn {

// Of one domain. Several may move to one tier.
class Move final : public Link {
 public:
  Move(TensorDomain& domain, std::shared_ptr<Tier> tier);

  [[nodiscard]] const std::shared_ptr<Tier>& tier() const { return tier_; }

  [[nodiscard]] bool applies(const Version& version) const override;
  [[nodiscard]] double packed_share(const Version& version) const override;
  [[nodiscard]] std::size_t bytes_here(const Version& version) const override;
  [[nodiscard]] bool has_room(const Version& version) const override;
  [[nodiscard]] bool takes_copies(const Version& version) const override;
  [[nodiscard]] bool take_copy(Version& version, Way& from) override;
  [[nodiscard]] Place leave(Version& version) override;
  [[nodiscard]] Place bring_back(Version& version) override;
  [[nodiscard]] bool has_arrived(const Version& version) const override;
  [[nodiscard]] Place wait(Version& version) override;
  void turn_back(Version& version) override;
  void discard(Version& version) override;

 private:
  [[nodiscard]] LinkFigures figures() const override { return tier_->link(); }
  [[nodiscard]] std::size_t queued_in() const override { return tier_->queued_in(); }
  void note_copy(double taken);
  void learn_of_waits();

  [[nodiscard]] bool has_device_of(const Version& version) const;

  const std::shared_ptr<Tier> tier_;
  const bool packs_;  // its copies stay in the memory: Note [A copy may stay in memory]
  const std::shared_ptr<Tier::Waits> waits_ = std::make_shared<Tier::Waits>();
  // A copy is found by the address of its version: whoever discards it may be the version's destructor.
  std::unordered_map<const Version*, std::unique_ptr<Tier::Copy>> copies_;
};

// The link that plans are made for: to the first tier that is not packed, with the room of all that take the same
// values, and to the first packed one beside it, as measured of late. `drops`: the level may drop its versions as
// well. Nothing if there is no tier.
[[nodiscard]] std::optional<LinkOptions> link_to(const std::vector<std::shared_ptr<Tier>>& tiers, bool drops);
// The way of all levels of `domain` to `tier`, made at first use.
[[nodiscard]] Way& way_to(TensorDomain& domain, const std::shared_ptr<Tier>& tier, bool drops);

}  // namespace rematfn
