// SPDX-License-Identifier: Apache-2.0
#include "operators/device_time.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <limits>

#include "base/interpreter.h"
#include "tensors/torch_compat.h"

namespace rematfn {
namespace {

constexpr int kTimes = 2;
constexpr std::size_t kMostKnown = std::size_t{1} << 16;
constexpr double kMilliseconds = 1e-3;

struct Known {
  int times = 0;
  double seconds = std::numeric_limits<double>::infinity();  // the least
};

Known& known_of(FootprintKey key) {
  thread_local ska::flat_hash_map<FootprintKey, Known> all;
  if (all.size() > kMostKnown) all.clear();
  return all[key];
}

}  // namespace

// See Note [An accelerator is timed once]
DeviceTime::DeviceTime(FootprintKey key, c10::Device device) : key_(key), device_(device) {
  if (known_of(key).times == kTimes) return;
  const auto* guard = c10::impl::getDeviceGuardImpl(device.type());
  const c10::Stream stream = guard->getStream(device);
  if (capture_of(*guard, stream) != 0) return;
  begin_.emplace(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  begin_->record(stream);
}

double DeviceTime::seconds() {
  Known& known = known_of(key_);
  if (!begin_) return known.times == 0 ? 0 : known.seconds;
  c10::Event end(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
  end.record(c10::impl::getDeviceGuardImpl(device_.type())->getStream(device_));
  {
    const detail::WithoutInterpreter scope;
    end.synchronize();
  }
  ++known.times;
  return known.seconds = std::min(known.seconds, kMilliseconds * begin_->elapsedTime(end));
}

}  // namespace rematfn
