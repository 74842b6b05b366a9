// SPDX-License-Identifier: Apache-2.0
#include "levels/device_memory.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/ones.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/ScopeExit.h>

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "engine/domain.h"
#include "levels/asked.h"
#include "levels/meter.h"
#include "tensors/thread_keys.h"

namespace rematfn {
namespace {

// How a virtual function is called that has this signature: `its` is its object.
using Allocate = c10::DataPtr (*)(c10::Allocator* its, std::size_t nbytes);

struct Asking {
  std::once_flag looked_at;
  std::atomic<Allocate> theirs{nullptr};  // null: it does not ask
  c10::Allocator* its = nullptr;
};
std::array<Asking, c10::COMPILE_TIME_MAX_DEVICE_TYPES> asking;

// The counters of blocks that count beside operators, by address.
struct Labels {
  std::mutex mutex;
  std::unordered_map<const void*, Pages::Label> of;
  std::atomic<std::size_t> count{0};  // asked first: mostly there are none
};
Labels& labels = *new Labels;  // blocks are freed while the process ends

constexpr std::size_t kSmallBlock = std::size_t{1} << 20;  // what is no larger is cut off to the next 512 bytes
std::array<std::atomic<std::int64_t>, std::numeric_limits<c10::DeviceIndex>::max() + 1> rounded;  // by device
std::atomic<std::int64_t> rounded_sum{0};
std::atomic<int> devices_seen{0};

void count_rounded_of(c10::Allocator& its, c10::DeviceIndex device) {
  const auto stats = static_cast<c10::DeviceAllocator&>(its).getDeviceStats(device);
  const std::int64_t now = stats.allocated_bytes[0].current - stats.requested_bytes[0].current;
  const std::int64_t before = rounded[static_cast<std::size_t>(device)].exchange(now);
  if (device < devices_seen) {
    rounded_sum += now - before;
  } else {
    devices_seen = device + 1;  // what there was before is of no interest
  }
}

void put_label(const void* block, const Pages::Label& label) {
  if (label.owner == nullptr) return;
  const std::lock_guard guard(labels.mutex);
  labels.of.insert_or_assign(block, label);
  labels.count = labels.of.size();
}

std::optional<Pages::Label> take_label(const void* block) {
  if (labels.count.load(std::memory_order_relaxed) == 0) return std::nullopt;
  const std::lock_guard guard(labels.mutex);
  const auto found = labels.of.find(block);
  if (found == labels.of.end()) return std::nullopt;
  const Pages::Label label = found->second;
  labels.of.erase(found);
  labels.count = labels.of.size();
  return label;
}

// What this thread takes as it makes workspaces.
REMATFN_THREAD_LOCAL bool is_warming = false;
REMATFN_THREAD_LOCAL std::int64_t kept_here = 0;

void note_freed(const void* block, std::size_t nbytes) {
  if (is_warming) kept_here -= static_cast<std::int64_t>(nbytes);
  if (running_meter != nullptr) running_meter->freed(nbytes);
  if (const auto label = take_label(block)) stop_counting(*label);
}

REMATFN_THREAD_LOCAL std::uint64_t failed = 0;

// See Note [The allocation is tried again, not the operator]
c10::DataPtr allocate_at_last(Allocate theirs, c10::Allocator* its, std::size_t nbytes) {
  for (;;) {
    try {
      return theirs(its, nbytes);
    } catch (const c10::OutOfMemoryError&) {
      if (evict_for_allocation(nbytes, /*on_accelerator=*/true)) continue;
      ++failed;
      throw;
    }
  }
}

template <c10::DeviceType type>
c10::DataPtr allocate(c10::Allocator* its, std::size_t nbytes) {
  const Allocate theirs = asking[static_cast<std::size_t>(type)].theirs;
  if (nbytes == 0) return theirs(its, nbytes);
  Asked asked(nbytes);
  c10::DataPtr block = allocate_at_last(theirs, its, nbytes);
  if (is_warming) kept_here += static_cast<std::int64_t>(nbytes);
  put_label(block.get(), asked.label());
  asked.granted();
  if (nbytes > kSmallBlock && DomainLock::is_held()) count_rounded_of(*its, block.device().index());
  return block;
}

// Where the class of `its` has its function `allocate`. By the Itanium C++ ABI a pointer to a virtual member
// function is its offset in the table, in bytes; plus one, unless the lowest bit is another word's (ARM).
Allocate* entry_of_allocate(c10::Allocator& its) {
  struct Member {
    std::uintptr_t function;
    std::ptrdiff_t adjustment;
  };
  const auto member = std::bit_cast<Member>(&c10::Allocator::allocate);
  const std::uintptr_t offset = member.function & ~std::uintptr_t{1};
  const auto table = *reinterpret_cast<std::uintptr_t*>(&its);
  return reinterpret_cast<Allocate*>(table + offset);
}

bool replace(c10::Allocator& its, Allocate ours, Asking& asks) {
  Allocate* const entry = entry_of_allocate(its);
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  auto* const first = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(entry) & ~(page - 1));
  if (mprotect(first, page, PROT_READ | PROT_WRITE) != 0) return false;
  asks.its = &its;
  asks.theirs = *entry;
  std::atomic_ref(*entry).store(ours);
  mprotect(first, page, PROT_READ);  // as the loader left it
  return true;
}

namespace cuda = c10::cuda::CUDACachingAllocator;

// Null if there is none yet, or it is another one, or keeps nothing, and so tells of nothing.
cuda::CUDAAllocator* native_cuda_allocator() {
  static void* const found = dlsym(RTLD_DEFAULT, "_ZN3c104cuda20CUDACachingAllocator9allocatorE");
  if (found == nullptr || std::getenv("PYTORCH_NO_CUDA_MEMORY_CACHING") != nullptr) return nullptr;
  cuda::CUDAAllocator* its = *static_cast<std::atomic<cuda::CUDAAllocator*>*>(found);
  return its != nullptr && its->initialized() && its->name() == "native" ? its : nullptr;
}

void have_cuda_asked(Asking& asks) {
  cuda::CUDAAllocator* its = native_cuda_allocator();
  if (its == nullptr || !replace(*its, &allocate<c10::kCUDA>, asks)) return;
  its->attachAllocatorTraceTracker([](const cuda::TraceEntry& entry) {
    if (entry.action_ != cuda::TraceEntry::FREE_REQUESTED) return;
    note_freed(reinterpret_cast<const void*>(entry.addr_), entry.size_);
  });
}

std::atomic<std::size_t> in_workspaces{0};

}  // namespace

bool asks_for_room(c10::DeviceType type) {
  Asking& its = asking[static_cast<std::size_t>(type)];
  if (type == c10::kCUDA) std::call_once(its.looked_at, [&] { have_cuda_asked(its); });
  return its.theirs.load(std::memory_order_relaxed) != nullptr;
}

TellFreed have_asked(c10::DeviceType type, c10::Allocator& its) {
  TORCH_CHECK(type == c10::kPrivateUse1, "torch's own devices are known");
  Asking& asks = asking[static_cast<std::size_t>(type)];
  if (asks.theirs == nullptr) replace(its, &allocate<c10::kPrivateUse1>, asks);
  return &note_freed;
}

std::int64_t last_rounded() { return rounded_sum.load(std::memory_order_relaxed); }

std::int64_t count_rounded() {
  for (Asking& asks : asking) {
    if (asks.theirs == nullptr) continue;
    for (int device = 0; device < devices_seen; ++device) count_rounded_of(*asks.its, static_cast<c10::DeviceIndex>(device));
  }
  return last_rounded();
}

void count_no_more_on_device(const c10::DataPtr& bytes) {
  if (const auto label = take_label(bytes.get())) stop_counting(*label);
}

std::uint64_t failed_allocations() { return failed; }

// See Note [cuBLAS's workspace is nobody's]
void warm_libraries(c10::Device device) {
  thread_local std::vector<c10::Stream> warm;
  if (!device.is_cuda()) return;
  const c10::Stream stream = c10::impl::getDeviceGuardImpl(c10::kCUDA)->getStream(device);
  if (std::ranges::find(warm, stream) != warm.end()) return;
  warm.push_back(stream);
  Meter* const meter = std::exchange(running_meter, nullptr);
  is_warming = true;
  kept_here = 0;
  const auto put_back = c10::make_scope_exit([&] {
    running_meter = meter;
    is_warming = false;
    if (kept_here > 0) in_workspaces += static_cast<std::size_t>(kept_here);
  });
  try {
    const BackendScope scope;
    const auto options = at::TensorOptions(device).dtype(at::kFloat);
    const at::Tensor matrix = at::ones({16, 16}, options);
    // With a bias cuBLASLt may be chosen, which has another.
    static_cast<void>(at::addmm(matrix, matrix, matrix));
    static_cast<void>(at::addmm(at::ones({16}, options), matrix, matrix));
  } catch (const c10::Error&) {
    // There is no memory, or deterministic algorithms are wanted and cuBLAS is not set up for them: the
    // program's own products will say so, if it has any.
  }
}

std::size_t workspace_bytes() { return in_workspaces; }

}  // namespace rematfn
