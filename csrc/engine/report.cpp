// SPDX-License-Identifier: Apache-2.0
#include "engine/report.h"

#include <optional>

#include "engine/domain.h"

namespace rematfn {

Statistics Report::read() const {
  // The call may be running, on another thread.
  const std::shared_ptr<Domain> owner = domain.lock();
  std::optional<DomainLock> lock;
  if (owner && !owner->lost_to_fork() && !owner->is_held_here()) lock.emplace(owner);
  return statistics;
}

}  // namespace rematfn
