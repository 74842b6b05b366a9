// SPDX-License-Identifier: Apache-2.0
#include "levels/meter.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

namespace rematfn {

REMATFN_THREAD_LOCAL Meter* running_meter = nullptr;

Meter::Meter(Table& level, std::size_t granted, Refuse refuse)
    : level_(level),
      granted_(static_cast<std::int64_t>(granted)),
      refuse_(refuse),
      outer_(std::exchange(running_meter, this)) {}

Meter::~Meter() {
  add(-live_);  // from now on they are counted by the table, if at all
  running_meter = outer_;
}

void Meter::add(std::int64_t nbytes) {
  live_ += nbytes;
  static_cast<Level&>(level_).note_in_flight(nbytes);
}

// See Note [Scratch is made room for as it is asked for]
void Meter::allocated(std::size_t nbytes) {
  const std::int64_t live = live_ + static_cast<std::int64_t>(nbytes);
  if (live > granted_) [[unlikely]] {
    running_meter = nullptr;  // what eviction frees is not the operator's
    const auto put_back = c10::make_scope_exit([&] { running_meter = this; });
    try {
      level_.domain->make_room(level_, static_cast<std::size_t>(live));
    } catch (const NoRoom& why) {
      refuse_(why, static_cast<std::size_t>(live));
    }
    granted_ = live;
  }
  add(static_cast<std::int64_t>(nbytes));
  peak_ = std::max(peak_, live_);
}

}  // namespace rematfn
