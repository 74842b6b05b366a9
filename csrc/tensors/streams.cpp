// SPDX-License-Identifier: Apache-2.0
#include "tensors/streams.h"

#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>

#include "tensors/torch_compat.h"

namespace rematfn {
namespace {

// Null for a device without streams.
const c10::impl::DeviceGuardImplInterface* guard_if_any(c10::Device device) {
  if (device.is_meta() || !c10::impl::hasDeviceGuardImpl(device.type())) return nullptr;
  return c10::impl::getDeviceGuardImpl(device.type());
}

void wait_for(const c10::Stream& first, const c10::Stream& then) {
  c10::Event reached(first.device_type());
  reached.record(first);
  reached.block(then);
}

}  // namespace

// See Note [A level's work is in one order]
void Streams::enter_current(c10::Device device) {
  const auto* guard = guard_if_any(device);
  if (guard == nullptr) return;
  const c10::Stream now = guard->getStream(device);
  capture_ = capture_of(*guard, now);
  const auto used = std::find_if(used_.begin(), used_.end(), [&](const Used& u) {
    return u.last.device() == now.device();
  });
  if (used == used_.end()) {
    used_.push_back({now, {}});
    return;
  }
  if (used->last == now) return;
  if (capture_of(*guard, used->last) != capture_) {  // See Note [A captured call keeps to itself], 5
    *used = {now, {}};
    return;
  }
  several_ = true;
  wait_for(used->last, now);
  std::erase(used->others, now);
  used->others.push_back(used->last);
  used->last = now;
}

void Streams::see_captures() {
  capture_ = 0;
  for (const Used& used : used_) {
    const auto* guard = guard_if_any(used.last.device());
    capture_ = std::max(capture_, capture_of(*guard, guard->getStream(used.last.device())));
  }
}

std::vector<c10::Device> Streams::devices() const {
  std::vector<c10::Device> devices;
  for (const Used& used : used_) devices.push_back(used.last.device());
  return devices;
}

void Streams::tell_allocator(const c10::DataPtr& bytes) {
  if (bytes.device().is_cpu() || bytes.get() == nullptr) return;
  const auto* guard = guard_if_any(bytes.device());
  if (guard == nullptr) return;
  guard->recordDataPtrOnStream(bytes, guard->getStream(bytes.device()));
}

void Streams::settle() {
  for (const Used& used : used_) {
    for (const c10::Stream& other : used.others) wait_for(used.last, other);
  }
}

}  // namespace rematfn
