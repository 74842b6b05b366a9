// SPDX-License-Identifier: Apache-2.0
//
// device_time.h: how long an accelerator takes for a call.
//
// Note [An accelerator is timed once]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// The host's clock tells how long it takes to enqueue a kernel. To know how long the kernel takes, two
// events are recorded around it, and the second is waited for: then nothing overlaps. So a call is
// timed twice, of which the first may load the kernel or choose it, and calls that are alike are taken to
// take as long. From then on nobody waits.

#pragma once

#include <c10/core/Event.h>

#include <optional>

#include "operators/footprint.h"

namespace rematfn {

// For the scope of one call on `device`, whose key is `key`.
class DeviceTime {
 public:
  DeviceTime(FootprintKey key, c10::Device device);

  // The call has been enqueued.
  [[nodiscard]] double seconds();

 private:
  const FootprintKey key_;
  const c10::Device device_;
  std::optional<c10::Event> begin_;  // none: it is known
};

}  // namespace rematfn
