// SPDX-License-Identifier: Apache-2.0
//
// disk_tier.h: a disk, for the bytes of tensors on a CPU.

#pragma once

#include "memory/disk.h"
#include "tensors/tier.h"

namespace rematfn {

// Throws DiskError.
[[nodiscard]] std::shared_ptr<Tier> make_disk_tier(Disk::Options options);

}  // namespace rematfn
