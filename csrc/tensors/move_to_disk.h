// SPDX-License-Identifier: Apache-2.0
//
// move_to_disk.h: versions go to a disk, and come back from it.

#pragma once

#include <chrono>
#include <memory>
#include <unordered_map>

#include "engine/link.h"
#include "memory/disk.h"
#include "planning/simulation.h"
#include "tensors/shared_bytes.h"

namespace rematfn {

class TensorDomain;

// Of one domain. Several may move to one disk.
class MoveToDisk final : public Link {
 public:
  MoveToDisk(Domain& domain, std::shared_ptr<Disk> disk);

  [[nodiscard]] const std::shared_ptr<Disk>& disk() const { return disk_; }

  [[nodiscard]] bool applies(const Version& version) const override;
  [[nodiscard]] bool has_room(const Version& version) const override;
  [[nodiscard]] Place leave(Version& version) override;
  [[nodiscard]] Place bring_back(Version& version) override;
  [[nodiscard]] bool has_arrived(const Version& version) const override;
  [[nodiscard]] Place wait(Version& version) override;
  void turn_back(Version& version) override;
  void discard(Version& version) override;

 private:
  struct Moved {
    SharedBytes leaves;     // these live longer than what reads the one,
    c10::Storage comes_to;  // and writes to the other
    std::unique_ptr<Disk::Copy> copy;
  };

  using Clock = std::chrono::steady_clock;

  void note_waited(Clock::time_point since);
  [[nodiscard]] LinkFigures figures() const override;
  [[nodiscard]] std::size_t queued_in() const override { return disk_->queued_to_read(); }

  const std::shared_ptr<Disk> disk_;
  // A copy is found by the address of its version: whoever discards it may be the version's destructor.
  std::unordered_map<const Version*, Moved> moved_;
};

// As measured of late; for a level that may drop its versions as well, or not.
[[nodiscard]] LinkOptions link_to(Disk& disk, bool drops);
// That of all levels of `domain`; likewise.
[[nodiscard]] Way& way_to(TensorDomain& domain, const std::shared_ptr<Disk>& disk, bool drops);

}  // namespace rematfn
