// SPDX-License-Identifier: Apache-2.0
#include "levels/allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <pthread.h>

#include <atomic>
#include <limits>
#include <mutex>
#include <utility>

#include "base/thread_local.h"
#include "levels/asked.h"
#include "levels/device_memory.h"
#include "levels/meter.h"
#include "memory/pages.h"
#include "tensors/settings.h"

namespace rematfn {
namespace {

constexpr std::size_t kLeastPaged = std::size_t{16} << 10;

#ifdef __SANITIZE_ADDRESS__
constexpr bool kMayUsePages = false;  // it watches the C library's blocks
#else
constexpr bool kMayUsePages = true;
#endif
std::atomic<bool> uses_pages{kMayUsePages};

REMATFN_THREAD_LOCAL std::optional<std::size_t> until_failure;

void fail_if_told_to() {
  if (!until_failure) return;
  if (*until_failure == 0) {
    until_failure.reset();
    TORCH_CHECK(false, "an allocation fails, as a test has asked for");
  }
  --*until_failure;
}

void count_freed(const Pages::Label& label) {
  if (running_meter != nullptr) running_meter->freed(label.nbytes);
  stop_counting(label);
}

// Where the blocks of the C library have their label: in front. The space keeps the alignment that
// torch promises.
constexpr std::size_t kAhead = 64;
static_assert(sizeof(Pages::Label) <= kAhead);

Pages::Label* label_ahead_of(void* data) {
  return reinterpret_cast<Pages::Label*>(static_cast<char*>(data) - kAhead);
}

void* place(const Pages::Label& label) {
  if (label.nbytes >= kLeastPaged && uses_pages.load(std::memory_order_relaxed)) {
    if (void* block = pages().allocate(label)) return block;
  }
  auto* block = static_cast<char*>(c10::alloc_cpu(label.nbytes + kAhead));
  new (block) Pages::Label(label);
  return block + kAhead;
}

// See Note [The allocation is tried again, not the operator]
void* place_at_last(const Pages::Label& label) {
  for (;;) {
    try {
      return place(label);
    } catch (const c10::Error&) {
      if (!pages().give_back() && !evict_for_allocation(label.nbytes, /*on_accelerator=*/false)) throw;
    }
  }
}

// The profiler is told of the bytes that were asked for, as without us.
class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    const c10::Device kCpu(c10::kCPU);
    if (nbytes == 0) return {nullptr, nullptr, &release, kCpu};
    TORCH_CHECK(nbytes <= std::numeric_limits<std::ptrdiff_t>::max() - kAhead,
                "an allocation of ", nbytes, " bytes: more than there are addresses");
    fail_if_told_to();
    note_allocation();
    Asked asked(nbytes);
    void* data = place_at_last(asked.label());
    asked.granted();
    c10::profiledCPUMemoryReporter().New(data, nbytes);
    return {data, data, &release, kCpu};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  static void count_no_more(const c10::DataPtr& bytes) {
    void* data = bytes.get_context();
    if (bytes.get_deleter() != &release || data == nullptr) return;
    auto label = pages().disown(data);
    if (!label) {
      // Two threads may seal one tensor.
      Pages::Label* ahead = label_ahead_of(data);
      label = {ahead->nbytes, std::atomic_ref(ahead->owner).exchange(nullptr)};
    }
    stop_counting(*label);
  }

  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }

 private:
  static void release(void* data) {
    if (data == nullptr) return;
    c10::profiledCPUMemoryReporter().Delete(data);  // before the address is handed out again
    if (const auto label = pages().free(data)) return count_freed(*label);
    count_freed(*label_ahead_of(data));
    c10::free_cpu(static_cast<char*>(data) - kAhead);
  }
};

Allocator* ours = nullptr;

}  // namespace

void count_no_more(c10::StorageImpl& storage) {
  const c10::DataPtr& bytes = storage._mutable_data_ptr_no_checks();
  if (!bytes.device().is_cpu()) return count_no_more_on_device(bytes);
  Allocator::count_no_more(bytes);
}

bool is_allocator_installed() {
  return ours != nullptr && c10::GetCPUAllocator() == ours;
}

void use_pages(bool on) { uses_pages = on && kMayUsePages; }

std::optional<std::size_t> fail_allocation(std::optional<std::size_t> count) {
  install_allocator();
  return std::exchange(until_failure, count);
}

void install_allocator() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Then shape inference alone bounds the peak.
    if (c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator()) return;
    // Registered before those of levels, so that in a fork this lock is the last to be taken.
    pthread_atfork([] { pages().lock(); }, [] { pages().unlock(); }, [] { pages().unlock(); });
    ours = new Allocator;
    c10::SetCPUAllocator(ours, /*priority=*/255);
  });
}

}  // namespace rematfn
