// SPDX-License-Identifier: Apache-2.0
#include "memory/pages.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "base/background.h"

namespace rematfn {
namespace {

// Whether addresses count in a limit of the process. It may be set at any time.
bool addresses_are_limited() {
  for (auto which : {RLIMIT_AS, RLIMIT_DATA}) {
    rlimit limit{};
    if (getrlimit(which, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) return true;
  }
  return false;
}

// There, or anywhere; 0 if that cannot be had.
std::size_t map(std::size_t there, std::size_t nbytes) {
  constexpr int kNoReplace = 0x100000;  // MAP_FIXED_NOREPLACE; before Linux 4.17 a hint
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | (there != 0 ? kNoReplace : 0);
  void* pages = mmap(reinterpret_cast<void*>(there), nbytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (pages == MAP_FAILED) return 0;
  const auto begin = reinterpret_cast<std::size_t>(pages);
  if (there == 0 || begin == there) return begin;
  munmap(pages, nbytes);
  return 0;
}

// Where a process has as many mappings as it may, none can be cut. The pages go back all the same, and
// nobody will use the addresses.
void unmap(std::size_t begin, std::size_t nbytes) {
  auto* const pages = reinterpret_cast<void*>(begin);
  if (munmap(pages, nbytes) != 0) madvise(pages, nbytes, MADV_DONTNEED);
}

std::size_t added(std::size_t a, std::size_t b) { return a > SIZE_MAX - b ? SIZE_MAX : a + b; }

}  // namespace

Pages& pages() {
  static auto* const pool = new Pages;  // outlives the tensors of a dying process
  return *pool;
}

// ---- tenants ----------------------------------------------------------------------------------

void Pages::enter(Tenant& tenant) {
  const std::lock_guard guard(mutex_);
  tenants_.push_back(&tenant);
  tenant_count_ = tenants_.size();
}

void Pages::leave(Tenant& tenant) {
  const std::lock_guard guard(mutex_);
  std::erase(tenants_, &tenant);
  tenant_count_ = tenants_.size();
  trim_to(room(0));
}

void Pages::trim() {
  const std::lock_guard guard(mutex_);
  trim_to(room(0));
}

void Pages::give_back_kept() {
  const std::lock_guard guard(mutex_);
  kept_ = 0;
  trim_to(room(0));
}

bool Pages::give_back() {
  const std::lock_guard guard(mutex_);
  const bool any = waiting_.nbytes() > 0;
  kept_ = 0;
  trim_to(0);
  return any;
}

bool Pages::any_lives() const {
  return std::any_of(tenants_.begin(), tenants_.end(), [](const Tenant* t) { return t->lives(); });
}

std::size_t Pages::room(std::size_t freed) {
  if (waiting_.nbytes() == 0) return 0;
  if (!any_lives()) return addresses_are_limited() ? 0 : kept_.load();  // others may need them
  std::size_t left = freed;
  std::size_t handed_out = 0;
  for (const Tenant* t : tenants_) {
    if (!t->lives()) continue;
    left = added(left, t->unused());
    handed_out += t->handed_out();
  }
  kept_ = left == SIZE_MAX ? 0 : added(left, handed_out);  // without a budget nobody says how much may stay
  return left;
}

void Pages::trim_to(std::size_t nbytes) {
  while (waiting_.nbytes() > nbytes) {
    const auto gone = waiting_.take_oldest(whole_pages(waiting_.nbytes() - nbytes));
    unmap(gone.begin, gone.nbytes);
  }
}

// ---- blocks -----------------------------------------------------------------------------------

void* Pages::allocate(const Label& label) {
  if (tenant_count_.load(std::memory_order_relaxed) == 0) return nullptr;
  const std::size_t nbytes = whole_pages(label.nbytes);
  std::size_t begin = 0;
  try {
    const std::lock_guard guard(mutex_);
    if (!any_lives()) return nullptr;
    begin = find_place(nbytes);
    if (begin == 0) return nullptr;
    blocks_.emplace(begin, label);
    trim_to(room(0));
  } catch (const std::bad_alloc&) {
    if (begin != 0) unmap(begin, nbytes);
    return nullptr;
  }
  return reinterpret_cast<void*>(begin);
}

std::size_t Pages::find_place(std::size_t nbytes) {
  if (const auto begin = waiting_.take(nbytes)) return *begin;
  const auto [large, size] = waiting_.largest();
  for (const std::size_t from : {large + size, large - (nbytes - size)}) {
    if (size == 0 || map(from, nbytes - size) == 0) continue;
    static_cast<void>(waiting_.take(size));
    return std::min(large, from);
  }
  const std::size_t begin = map(0, nbytes);
  if (begin != 0) return begin;
  trim_to(0);
  return map(0, nbytes);
}

template <class Change>
std::optional<Pages::Label> Pages::with_block(void* block, const Change& change) {
  const auto begin = reinterpret_cast<std::size_t>(block);
  if (begin % kPage != 0) return {};  // not of this pool
  const std::lock_guard guard(mutex_);
  const auto found = blocks_.find(begin);
  if (found == blocks_.end()) return {};
  const Label label = found->second;
  change(found);
  return label;
}

std::optional<Pages::Label> Pages::disown(void* block) {
  return with_block(block, [](Blocks::iterator at) { at->second.owner = nullptr; });
}

std::optional<Pages::Label> Pages::free(void* block) {
  return with_block(block, [&](Blocks::iterator at) {
    const auto [begin, label] = *at;
    blocks_.erase(at);
    let_wait(begin, whole_pages(label.nbytes));
  });
}

std::optional<Pages::Label> Pages::shrink(void* block, std::size_t nbytes) {
  return with_block(block, [&](Blocks::iterator at) {
    const std::size_t before = whole_pages(at->second.nbytes);
    const std::size_t left = whole_pages(nbytes);
    at->second.nbytes = nbytes;
    if (left < before) let_wait(at->first + left, before - left);
  });
}

void Pages::let_wait(std::size_t begin, std::size_t nbytes) {
  try {
    waiting_.add(begin, nbytes);
  } catch (const std::bad_alloc&) {
    unmap(begin, nbytes);
  }
  trim_to(room(nbytes));
}

std::size_t Pages::waiting() {
  const std::lock_guard guard(mutex_);
  return waiting_.nbytes();
}

// ---- when nobody comes ------------------------------------------------------------------------

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kWhile{10};  // as in jemalloc

std::atomic<Clock::time_point> until;
std::atomic<bool> runs{false};  // the thread, which nobody waits for

void give_back_when_idle() {
  do {
    for (auto then = until.load(); Clock::now() < then; then = until) std::this_thread::sleep_until(then);
    pages().give_back_kept();
    runs = false;
  } while (Clock::now() < until.load() && !runs.exchange(true));  // somebody came, and saw it run
}

}  // namespace

void keep_pages_for_a_while() {
  if (!pages().keeps()) return;
  static const int in_child = pthread_atfork(nullptr, nullptr, [] { runs = false; });
  static_cast<void>(in_child);
  until = Clock::now() + kWhile;
  if (runs.exchange(true)) return;
  try {
    start_in_background(give_back_when_idle).detach();
  } catch (const std::system_error&) {
    runs = false;
    pages().give_back_kept();
  }
}

}  // namespace rematfn
