// SPDX-License-Identifier: Apache-2.0
//
// disk.h: a tier on a disk: bytes are written there and read back beside what else goes on.
//
// One file, which nobody else sees and which is divided by an account; a few threads, started at the first
// transfer.

#pragma once

#include <memory>
#include <string>

#include "memory/transfers.h"
#include "tensors/tier.h"

namespace rematfn {

struct DiskOptions {
  std::string folder;
  std::size_t budget = 0;  // a hard cap, in bytes
  bool verify = false;     // what comes back is compared with what left, by a checksum
  Transfers::Options transfers{};
};

// Raises kOffload if the folder cannot be written to or is memory itself. Makes no file yet. Copies hold
// the tier.
[[nodiscard]] std::shared_ptr<Tier> make_disk(const DiskOptions& options, const FileCalls& calls = {});

}  // namespace rematfn
