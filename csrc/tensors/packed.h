// SPDX-License-Identifier: Apache-2.0
//
// packed.h: a tier in the memory itself: what lies there is packed. For tensors on a CPU.
//
// A value is packed where it lies (Note [Packed where it lies]) on the threads that operators run on. Nothing goes
// on beside that: on a CPU a copy in the background takes its time from operators all the same.

#pragma once

#include <memory>

#include "tensors/tier.h"

namespace rematfn {

// `verify`: what is unpacked is compared with what was packed, by a checksum. Copies hold the tier.
[[nodiscard]] std::shared_ptr<Tier> make_packed(bool verify);

// For tests: whatever can be packed is worth it from now on, however small.
void pack_everything(bool on);

}  // namespace rematfn
