// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <c10/util/Exception.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cstdio>
#include <cstring>
#include <memory>

namespace fake {
namespace {

constexpr std::size_t kPage = 4096;

void open(const Block& block) {
  TORCH_CHECK(mprotect(block.data, block.mapped, PROT_READ | PROT_WRITE) == 0, "mprotect fails");
  std::memset(block.data, 0xFF, block.mapped);
}

void close(const Block& block) { mprotect(block.data, block.mapped, PROT_NONE); }

}  // namespace

Block* Memory::find(const void* data) {
  const auto* address = static_cast<const char*>(data);
  const auto after = blocks_.upper_bound(address);
  if (after == blocks_.begin()) return nullptr;
  Block* block = std::prev(after)->second;
  return address < block->data + block->mapped ? block : nullptr;
}

Block* Memory::map(std::size_t mapped, std::optional<c10::StreamId> stream, int pool) {
  void* data = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(data != MAP_FAILED, "mmap fails");
  auto* block = new Block{static_cast<char*>(data), mapped, 0, stream, pool, {}, false};
  blocks_.emplace(block->data, block);
  counts_.mapped.increase(mapped);
  return block;
}

Block* Memory::allocate(std::size_t nbytes, std::optional<c10::StreamId> stream) {
  // The host's in powers of two, as torch's.
  const std::size_t pages = (nbytes + kPage - 1) / kPage * kPage;
  const std::size_t mapped = stream ? pages : std::bit_ceil(pages);
  std::unique_lock lock(mutex_);
  const auto is_over = [&] {
    return static_cast<std::size_t>(counts_.held.current) + nbytes > limit_;
  };
  if (is_over() && counts_.held.current > counts_.in_use.current) {
    lock.unlock();
    wait_for_all_streams();  // some of it may only be waiting for them
    lock.lock();
  }
  if (is_over()) {
    ++counts_.failures;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "The fake device is out of memory: ", nbytes,
                     " bytes were asked for, ", counts_.held.current, " of ", limit_,
                     " are held.");
  }
  const Graph* const graph = stream ? captured_on(*stream) : nullptr;
  const int pool = graph == nullptr ? 0 : graph->pool;
  auto& reusable = free_[{stream.value_or(-1), mapped, pool}];
  Block* block = nullptr;
  if (reusable.empty()) {
    block = map(mapped, stream, pool);
  } else {
    block = reusable.back();
    reusable.pop_back();
  }
  block->nbytes = nbytes;
  block->is_open = true;
  counts_.asked.increase(nbytes);
  counts_.in_use.increase(rounded(nbytes));
  counts_.held.increase(nbytes);
  lock.unlock();
  if (stream) {
    fake::stream(*stream).enqueue("the opening of a block", [block] { open(*block); });
  } else {
    open(*block);
  }
  return block;
}

// What follows the last stream that used it.
void Memory::retire(Block* block) {
  close(*block);
  const std::lock_guard lock(mutex_);
  counts_.held.decrease(block->nbytes);
  free_[kind_of(*block)].push_back(block);
}

// See Note [Memory is freed in stream order]
void Memory::free(Block* block) {
  std::unique_lock lock(mutex_);
  block->is_open = false;
  counts_.asked.decrease(block->nbytes);
  counts_.in_use.decrease(rounded(block->nbytes));
  std::set<c10::StreamId> users = std::exchange(block->used_on, {});
  if (block->stream) users.insert(*block->stream);
  if (block->stream && users.size() == 1) {
    counts_.held.decrease(block->nbytes);
    // Enqueued under the lock: whoever gets the block next opens it later.
    Stream& its = fake::stream(*block->stream);
    if (block->pool == 0) {
      its.enqueue_uncaptured("the closing of a block", [block] { close(*block); });
    } else if (captured_on(its.id) != nullptr) {  // else the graph may be running
      its.enqueue("the closing of a block", [block] { close(*block); });
    }
    free_[kind_of(*block)].push_back(block);
    return;
  }
  lock.unlock();
  const std::shared_ptr<Block> last(block, [this](Block* b) { retire(b); });
  for (const c10::StreamId user : users) {
    fake::stream(user).enqueue_uncaptured("the closing of a block", [last] {});
  }
}

void Memory::note_use(const void* data, c10::StreamId stream) {
  const std::lock_guard lock(mutex_);
  Block* block = find(data);
  TORCH_CHECK(block != nullptr && block->is_open, "record_stream of memory that is not in use");
  if (block->stream != stream) block->used_on.insert(stream);
}

bool Memory::note_use_of_block(const void* data, const void* context, c10::StreamId stream) {
  const std::lock_guard lock(mutex_);
  for (const auto& [first, block] : blocks_) {
    if (!block->is_open || (block != context && first != data)) continue;
    if (block->stream != stream) block->used_on.insert(stream);
    return true;
  }
  return false;
}

bool Memory::owns(const void* data) {
  const std::lock_guard lock(mutex_);
  return find(data) != nullptr;
}

bool Memory::may_own(const void* data) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  return !lock.owns_lock() || find(data) != nullptr;
}

// As CUDA's allocator, which leaves a part of a large block unsplit.
std::size_t Memory::rounded(std::size_t nbytes) {
  constexpr std::size_t kSmall = std::size_t{1} << 20;
  return nbytes <= kSmall ? nbytes : (nbytes + kSmall / 2 - 1) / (kSmall / 2) * (kSmall / 2);
}

Memory::Counts Memory::counts() {
  const std::lock_guard lock(mutex_);
  return counts_;
}

void Memory::forget_peak() {
  const std::lock_guard lock(mutex_);
  for (auto* stat : {&counts_.asked, &counts_.in_use, &counts_.held, &counts_.mapped}) stat->reset_peak();
}

void Memory::give_back_free() {
  wait_for_all_streams();
  const std::lock_guard lock(mutex_);
  for (auto& [kind, blocks] : free_) {
    if (std::get<int>(kind) != 0) continue;  // a graph may be replayed
    for (Block* block : blocks) {
      munmap(block->data, block->mapped);
      counts_.mapped.decrease(block->mapped);
      blocks_.erase(block->data);
      delete block;
    }
    blocks.clear();
  }
}

void Memory::limit_to(std::size_t nbytes) {
  const std::lock_guard lock(mutex_);
  limit_ = nbytes;
}

std::size_t Memory::limit() {
  const std::lock_guard lock(mutex_);
  return limit_;
}

// ---- a touch of what is closed ---------------------------------------------------------------

namespace {

struct sigaction before_ours;

// Says what happened, and lets the fault happen again for whoever handled it before.
void on_fault(int, siginfo_t* info, void*) {
  if (device_memory().may_own(info->si_addr) || pinned_memory().may_own(info->si_addr)) {
    char text[256];
    const int length = std::snprintf(
        text, sizeof text, "fake device: `%s` on stream %lld touched memory that is free\n",
        running.what == nullptr ? "the host" : running.what,
        static_cast<long long>(running.stream));
    static_cast<void>(!write(STDERR_FILENO, text, static_cast<std::size_t>(length)));
  }
  sigaction(SIGSEGV, &before_ours, nullptr);
}

Memory* watched(Memory* memory) {
  struct sigaction ours {};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &ours, &before_ours);
  return memory;
}

}  // namespace

Memory& device_memory() {
  static auto* const instance = watched(new Memory);
  return *instance;
}

Memory& pinned_memory() {
  static auto* const instance = new Memory;
  return *instance;
}

// ---- the two allocators ----------------------------------------------------------------------

namespace {

const c10::Device kDevice(kFake, 0);

std::atomic<TellFreed> tell_freed{nullptr};

void free_on_device(void* context) {
  auto* block = static_cast<Block*>(context);
  if (const TellFreed tell = tell_freed) tell(block->data, block->nbytes);
  c10::reportMemoryUsageToProfiler(block->data, -static_cast<std::int64_t>(block->nbytes), 0, 0,
                                   kDevice);
  device_memory().free(block);
}

}  // namespace

void record_use(const c10::DataPtr& bytes, c10::Stream stream) {
  if (bytes.get() == nullptr) return;
  TORCH_CHECK(bytes.get_deleter() == &free_on_device, "these bytes are not the allocator's to keep");
  device_memory().note_use(bytes.get(), stream.id());
}

namespace {

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    if (nbytes == 0) return {nullptr, kDevice};
    Block* block = device_memory().allocate(nbytes, current_stream().id);
    c10::reportMemoryUsageToProfiler(block->data, static_cast<std::int64_t>(nbytes), 0, 0,
                                     kDevice);
    return {block->data, block, &free_on_device, kDevice};
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    current_stream().enqueue("a copy", [=] { std::memcpy(to, from, count); });
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { device_memory().give_back_free(); }
  void recordStream(const c10::DataPtr& bytes, c10::Stream stream) override {
    record_use(bytes, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    const Memory::Counts counts = device_memory().counts();
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0] = counts.in_use;
    stats.requested_bytes[0] = counts.asked;
    stats.active_bytes[0] = counts.held;
    stats.reserved_bytes[0] = counts.mapped;
    stats.num_ooms = counts.failures;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { device_memory().forget_peak(); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex) override {
    const auto held = static_cast<std::size_t>(device_memory().counts().held.current);
    return {device_memory().limit() - held, device_memory().limit()};
  }
};

void free_on_host(void* context) { pinned_memory().free(static_cast<Block*>(context)); }

class HostAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    const c10::Device cpu(c10::kCPU);
    if (nbytes == 0) return {nullptr, cpu};
    Block* block = pinned_memory().allocate(nbytes, std::nullopt);
    return {block->data, block, &free_on_host, cpu};
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }

  bool record_event(void* data, void* context, c10::Stream stream) override {
    return pinned_memory().note_use_of_block(data, context, stream.id());
  }
  void empty_cache() override { pinned_memory().give_back_free(); }
  at::HostStats get_stats() override {
    const Memory::Counts counts = pinned_memory().counts();
    at::HostStats stats;
    stats.active_bytes = counts.held;
    stats.allocated_bytes = counts.mapped;
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override { pinned_memory().forget_peak(); }
};

const c10::AllocatorRegisterer<kFake> device_allocator(new DeviceAllocator);
const at::HostAllocatorRegistry<kFake> host_allocator(new HostAllocator);

}  // namespace
}  // namespace fake

extern "C" {

void fake_tell_freed(fake::TellFreed tell) { fake::tell_freed = tell; }
void fake_limit_memory(std::size_t nbytes) { fake::device_memory().limit_to(nbytes); }
void fake_limit_pinned(std::size_t nbytes) { fake::pinned_memory().limit_to(nbytes); }
std::size_t fake_pinned_bytes() {
  return static_cast<std::size_t>(fake::pinned_memory().counts().held.current);
}

}  // extern "C"
