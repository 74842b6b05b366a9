// SPDX-License-Identifier: Apache-2.0
#include "memory/pages.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "memory/system_pages.h"

namespace rematfn {

REMATFN_THREAD_LOCAL int WillBeFilled::depth_ = 0;

Pages& pages() {
  static auto* const pool = new Pages;  // outlives the tensors of a dying process
  return *pool;
}

// ---- tenants ----------------------------------------------------------------------------------

void Pages::enter(Tenant& tenant) {
  const std::lock_guard guard(mutex_);
  tenant.next_ = tenants_;
  tenant.previous_ = nullptr;
  if (tenants_ != nullptr) tenants_->previous_ = &tenant;
  tenants_ = &tenant;
  ++tenant_count_;
}

void Pages::leave(Tenant& tenant) {
  const std::lock_guard guard(mutex_);
  if (tenant.next_ != nullptr) tenant.next_->previous_ = tenant.previous_;
  (tenant.previous_ != nullptr ? tenant.previous_->next_ : tenants_) = tenant.next_;
  --tenant_count_;
  trim_to_tenants();
}

void Pages::trim() {
  const std::lock_guard guard(mutex_);
  trim_to_tenants();
}

bool Pages::give_back_kept() {
  const std::lock_guard guard(mutex_);
  const std::size_t waiting = spans_.waiting();
  kept_ = 0;
  spans_.notice_limits();
  trim_to_tenants();
  const bool any = spans_.waiting() < waiting;
  return (!spans_.has_cheap_addresses() && spans_.unmap_unused(/*waiting_too=*/true)) || any;
}

bool Pages::any_lives() const {
  for (const Tenant* t = tenants_; t != nullptr; t = t->next_) {
    if (t->lives()) return true;
  }
  return false;
}

std::size_t Pages::left_by_tenants() const {
  std::size_t sum = 0;
  for (const Tenant* t = tenants_; t != nullptr; t = t->next_) {
    if (!t->lives()) continue;
    const std::size_t left = t->unused();
    sum = left > SIZE_MAX - sum ? SIZE_MAX : sum + left;
  }
  return sum;
}

std::size_t Pages::handed_out_by_tenants() const {
  std::size_t sum = 0;
  for (const Tenant* t = tenants_; t != nullptr; t = t->next_) {
    if (t->lives()) sum += t->handed_out();
  }
  return sum;
}

// The tenants may still count `freed` bytes as used.
std::size_t Pages::excess(std::size_t freed) {
  if (spans_.waiting() == 0) return 0;
  std::size_t most = kept_;
  if (any_lives()) {
    most = left_by_tenants();
    // Without a budget nobody has said how much may stay.
    const bool bounded = most < SIZE_MAX - freed;
    most = bounded ? most + freed : SIZE_MAX;
    kept_ = bounded && spans_.has_cheap_addresses() ? most + handed_out_by_tenants() : 0;
  }
  return spans_.waiting() > most ? whole_pages(spans_.waiting() - most) : 0;
}

void Pages::trim_to_tenants(std::size_t freed) {
  if (spans_.huge_pages_are_due() && !any_lives()) spans_.renew_huge_pages();
  for (std::size_t left = excess(freed); left > 0;) {
    Span& span = spans_.longest_unused(left);
    left -= std::min(left, span.nbytes);
    spans_.give_back(span);
  }
  if (spans_.live() == 0 && !spans_.is_empty() && !any_lives()) spans_.unmap_unused();
}

// ---- blocks -----------------------------------------------------------------------------------

void* Pages::allocate(const Label& label, bool populated) {
  Spans::Gone gone;
  bool huge = false;
  char* block = nullptr;
  {
    if (tenant_count_.load(std::memory_order_relaxed) == 0) return nullptr;
    const std::lock_guard guard(mutex_);
    if (!any_lives()) return nullptr;
    Span* span = spans_.allocate(label.nbytes, gone);
    if (span == nullptr) return nullptr;
    span->label = label;
    block = span->begin;
    if (populated && gone.count > 0) {
      spans_.move_to(*span, gone, excess(0));
      huge = spans_.makes_huge(gone);
    }
    trim_to_tenants();
  }
  if (populated) gone.populate(huge);
  return block;
}

std::optional<Pages::Label> Pages::disown(void* block) {
  if (!may_be_ours(block)) return {};
  const std::lock_guard guard(mutex_);
  Span* span = spans_.find_block(block);
  if (span == nullptr) return {};
  return std::exchange(span->label, {span->label.nbytes, nullptr});
}

std::optional<Pages::Label> Pages::free(void* block) {
  if (!may_be_ours(block)) return {};
  const std::lock_guard guard(mutex_);
  Span* span = spans_.find_block(block);
  if (span == nullptr) return {};
  const Label label = span->label;
  const std::size_t freed = span->nbytes;
  spans_.free(*span);
  trim_to_tenants(freed);
  return label;
}

// ---- what holds -------------------------------------------------------------------------------

Pages::Usage Pages::usage() {
  const std::lock_guard guard(mutex_);
  return spans_.usage();
}

void Pages::unlock_in_child() {
  spans_.inherit();
  mutex_.unlock();
}

void Pages::check() {
  const std::lock_guard guard(mutex_);
  spans_.check();
}

}  // namespace rematfn
