// SPDX-License-Identifier: Apache-2.0
#include "engine/report.h"

#include <optional>
#include <utility>

#include "engine/domain.h"

namespace rematfn {

Statistics Report::read() const {
  // The call may be running, on another thread.
  const std::shared_ptr<Domain> owner = domain.lock();
  std::optional<DomainLock> lock;
  if (owner && !owner->lost_to_fork() && !owner->is_held_here()) lock.emplace(owner);
  return statistics;
}

std::shared_ptr<Trace> Report::take_trace(bool waits) {
  const std::shared_ptr<Domain> owner = domain.lock();
  std::optional<DomainLock> lock;
  if (owner && !owner->lost_to_fork()) {
    if (waits) {
      lock.emplace(owner);
    } else if (!lock.emplace(owner, std::try_to_lock)) {
      return nullptr;
    }
    if (owner->recorder && owner->recorder->trace == trace) owner->recorder.reset();
  }
  return std::move(trace);
}

}  // namespace rematfn
