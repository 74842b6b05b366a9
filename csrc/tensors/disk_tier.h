// SPDX-License-Identifier: Apache-2.0
//
// disk_tier.h: a disk, for the bytes of tensors on a CPU.

#pragma once

#include "memory/disk.h"
#include "tensors/tier.h"

namespace rematfn {

class DiskTier final : public Tier {
 public:
  explicit DiskTier(Disk::Options options)
      : Tier("disk", /*is_for_accelerators=*/false), disk_(std::move(options)) {}

  [[nodiscard]] bool has_room(const c10::Storage& bytes) const override {
    return disk_.has_room(bytes.nbytes());
  }
  [[nodiscard]] std::unique_ptr<Tier::Copy> put(const c10::Storage& bytes, TensorDomain& domain,
                                                std::shared_ptr<Waits> waits) override;
  [[nodiscard]] LinkFigures link() const override;
  void find_bandwidth() override;
  [[nodiscard]] std::size_t queued_in() const override { return disk_.queued_to_read(); }
  [[nodiscard]] TierFigures figures() override { return disk_.figures(); }

 private:
  class Copy;

  Disk disk_;
};

}  // namespace rematfn
