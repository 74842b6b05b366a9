// SPDX-License-Identifier: Apache-2.0
#include "levels/asked.h"

#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "levels/governed_nodes.h"
#include "levels/level.h"
#include "levels/refusals.h"

namespace rematfn {

Asked::Asked(std::size_t nbytes) : nbytes_(nbytes) {
  if (running_meter != nullptr) {
    running_meter->allocated(nbytes);
    meter_ = running_meter;
  } else if (UnrecordedBytes::are_counted()) {
    count_if_unrecorded();
  }
}

Asked::~Asked() {
  if (meter_ != nullptr) [[unlikely]] meter_->freed(nbytes_);
  if (beside_) [[unlikely]] beside_->subtract(nbytes_);
}

void Asked::granted() {
  meter_ = nullptr;
  static_cast<void>(beside_.release());  // the label has it
}

// See Note [Bytes beside operators] and Note [The operators of a node are its level's]
void Asked::count_if_unrecorded() {
  Level* level = level_of_thread(running_node());
  if (level == nullptr || !level->unrecorded || !is_intercepting()) return;
  beside_ = level->unrecorded;
  beside_->add(nbytes_);
  try {
    const DomainLock lock(level->domain);
    notice_unrecorded(*level);
  } catch (NoRoom& why) {
    beside_->subtract(nbytes_);
    why.unevictable -= std::min(why.unevictable, nbytes_);  // of what was asked for
    raise_budget_error(why, current_level() != nullptr
                                ? "a tensor made beside operators"
                                : "`" + torch::autograd::get_current_node()->name() + "`");
  } catch (...) {
    beside_->subtract(nbytes_);
    throw;
  }
}

void stop_counting(const Pages::Label& label) {
  if (label.owner == nullptr) [[likely]] return;
  const auto counter = c10::intrusive_ptr<UnrecordedBytes>::reclaim(
      static_cast<UnrecordedBytes*>(label.owner));
  counter->subtract(label.nbytes);
}

namespace {

// Of one that has run on an accelerator, and is not over. Under its lock.
bool is_idle(const TensorDomain& domain) {
  if (domain.levels.empty() || !domain.streams.any() || domain.was_in_backward) return false;
  return std::ranges::none_of(domain.levels, [](const Table* level) {
    return static_cast<const Level*>(level)->active.load();
  });
}

}  // namespace

// See Note [The allocation is tried again, not the operator]
bool evict_for_allocation(std::size_t nbytes, bool on_accelerator) {
  Meter* const meter = std::exchange(running_meter, nullptr);  // what goes is not its operator's
  bool any = false;
  for (const auto& domain : live_domains()) {
    if (domain->is_held_here()) {
      any |= domain->evict_after_failure(nbytes);
    } else if (on_accelerator) {
      if (const DomainLock lock(domain, std::try_to_lock); lock && is_idle(*domain)) {
        domain->streams.see_captures();
        any |= domain->evict_after_failure(nbytes);
      }
    }
  }
  running_meter = meter;
  return any;
}

}  // namespace rematfn
