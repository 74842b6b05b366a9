// SPDX-License-Identifier: Apache-2.0
#include "tensors/move.h"

#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "tensors/level_tensor.h"
#include "tensors/tensor_store.h"
#include "tensors/thread_keys.h"

namespace rematfn {

Move::Move(TensorDomain& domain, std::shared_ptr<Tier> tier)
    : Link(domain), tier_(std::move(tier)), packs_(tier_->link().packs) {}

bool Move::applies(const Version& version) const {
  if (packs_ && !is_worth_packing(version)) return false;
  return tensor_store.lost(version) || has_device_of(version);  // has_room() knows
}

bool Move::has_device_of(const Version& version) const {
  const c10::DeviceType type = tensor_version(version).current_storage().device_type();
  return tier_->for_accelerators ? type != c10::kCPU && type != c10::kMeta : type == c10::kCPU;
}

double Move::packed_share(const Version& version) const {
  return packs_ && has_device_of(version) ? tier_->packed_share(tensor_version(version).current_storage()) : 1;
}

std::size_t Move::bytes_here(const Version& version) const {
  const auto copy = copies_.find(&version);
  return copy == copies_.end() ? 0 : copy->second->bytes_here();
}

bool Move::has_room(const Version& version) const {
  return !tensor_store.lost(version) && tier_->has_room(tensor_version(version).current_storage());
}

bool Move::takes_copies(const Version& version) const { return tier_->has_room_for_copy(version.nbytes); }

bool Move::take_copy(Version& version, Way& from) {
  RECORD_FUNCTION(std::string("rematfn::move to the ") + tier_->name, {});
  std::unique_ptr<Tier::Copy> copy = tier_->take_over(*static_cast<Move&>(from).copies_.at(&version), waits_);
  learn_of_waits();
  if (!copy) return false;
  copies_.emplace(&version, std::move(copy));
  from.discard(version);
  return true;
}

Place Move::leave(Version& version) {
  RECORD_FUNCTION(std::string("rematfn::move to the ") + tier_->name, {});
  const c10::Storage bytes = tensor_version(version).current_storage();
  std::unique_ptr<Tier::Copy> copy = tier_->put(bytes, static_cast<TensorDomain&>(ledger_), waits_);
  if (!copy) return Place::kHere;
  if (packs_) {
    copies_.emplace(&version, std::move(copy));
    tensor_store.drop(version);
    learn_of_waits();
    return Place::kAway;
  }
  copy->leaves.share(bytes);
  note_copy(time_out(version.nbytes));
  copies_.emplace(&version, std::move(copy));
  learn_of_waits();
  return Place::kLeaving;
}

bool Move::has_arrived(const Version& version) const { return copies_.at(&version)->is_done(); }

Place Move::wait(Version& version) {
  Tier::Copy& copy = *copies_.at(&version);
  const bool was_leaving = version.place() == Place::kLeaving;
  std::optional<at::RecordFunction> range;
  if (!copy.is_done() && range.emplace(at::RecordScope::FUNCTION).isActive()) {
    range->before(std::string(was_leaving ? "rematfn::wait to the " : "rematfn::wait from the ") + tier_->name);
  }
  try {
    copy.wait(/*returning=*/!was_leaving);
  } catch (const CopyLost&) {
    if (!was_leaving) throw;
    discard(version);
    return Place::kHere;
  }
  learn_of_waits();
  if (was_leaving) {
    copy.leaves.reset();
    if (!tensor_store.taken_meanwhile(version)) {
      tensor_store.drop(version);
      return Place::kAway;
    }
  } else {
    const BackendScope scope;
    refill(tensor_version(version), copy.take());
  }
  discard(version);
  return Place::kHere;
}

Place Move::bring_back(Version& version) {
  if (packs_) static_cast<TensorDomain&>(ledger_).check_side(tensor_version(version));
  RECORD_FUNCTION(std::string("rematfn::move from the ") + tier_->name, {});
  const BackendScope scope;
  Tier::Copy& copy = *copies_.at(&version);
  const c10::DeviceGuard on(copy.device);
  copy.get(c10::Storage(c10::Storage::use_byte_size_t(), copy.nbytes,
                        c10::GetAllocator(copy.device.type()), /*resizable=*/true));
  learn_of_waits();
  if (packs_) {
    refill(tensor_version(version), copy.take());
    discard(version);
    return Place::kHere;
  }
  note_copy(time_in(version.nbytes));
  return Place::kComing;
}

void Move::turn_back(Version& version) {
  copies_.at(&version)->turn_back();
}

void Move::discard(Version& version) {
  copies_.erase(&version);
  learn_of_waits();
}

// Operators take longer beside it, perhaps.
void Move::note_copy(double taken) {
  if (figures().drag > 0) ledger_.copying += taken;
}

void Move::learn_of_waits() {
  ledger_.root->statistics.waited += waits_->seconds.exchange(0);
  ledger_.root->statistics.late_returns += waits_->late_returns.exchange(0);
}

Way& way_to(TensorDomain& domain, const std::shared_ptr<Tier>& tier, bool drops) {
  tier->try_again();
  if (drops) tier->find_bandwidth();
  for (const std::unique_ptr<Way>& way : domain.ways) {
    const auto* move = dynamic_cast<const Move*>(way.get());
    if (move != nullptr && move->tier() == tier) return *way;
  }
  return *domain.ways.emplace_back(std::make_unique<Move>(domain, tier));
}

std::optional<LinkOptions> link_to(const std::vector<std::shared_ptr<Tier>>& tiers, bool drops) {
  std::optional<LinkOptions> found;
  std::optional<LinkFigures> packing;
  bool for_accelerators = false;
  for (const std::shared_ptr<Tier>& tier : tiers) {
    if (tier->link().packs) {
      if (!packing) packing = tier->link();
    } else if (!found) {
      if (drops) tier->find_bandwidth();
      found = LinkOptions{tier->link(), tier->figures().capacity, drops};
      for_accelerators = tier->for_accelerators;
    } else if (tier->for_accelerators == for_accelerators) {
      found->room += std::min(tier->figures().capacity, kNoBudget - found->room);
    }
  }
  if (found) found->packing = packing;
  if (!found && packing) found = LinkOptions{*packing, kNoBudget, drops};
  return found;
}

}  // namespace rematfn
