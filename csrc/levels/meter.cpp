// SPDX-License-Identifier: Apache-2.0
#include "levels/meter.h"

#include <algorithm>
#include <utility>

#include "levels/refusals.h"

namespace rematfn {

REMATFN_THREAD_LOCAL Meter* running_meter = nullptr;

Meter::Meter(Table& level, std::size_t granted, const c10::OperatorHandle& op)
    : level_(level),
      granted_(static_cast<std::int64_t>(granted)),
      op_(op),
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
  if (live > granted_) {
    running_meter = nullptr;  // what eviction frees is not the operator's
    try {
      level_.domain->make_room(level_, static_cast<std::size_t>(live));
    } catch (const NoRoom& why) {
      running_meter = this;
      refused_ = live;
      raise_budget_error(why, "`" + c10::toString(op_.operator_name()) + "`", nullptr, /*in_kernel=*/true);
    }
    running_meter = this;
    granted_ = live;
  }
  add(static_cast<std::int64_t>(nbytes));
  peak_ = std::max(peak_, live_);
}

}  // namespace rematfn
