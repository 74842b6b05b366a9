// SPDX-License-Identifier: Apache-2.0
#include "meter.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <mutex>
#include <utility>

namespace rematfn {
namespace {

constinit thread_local Meter* running = nullptr;
constinit thread_local std::optional<std::size_t> until_failure;

void fail_if_told_to() {
  if (!until_failure) return;
  if (*until_failure == 0) {
    until_failure.reset();
    TORCH_CHECK(false, "an allocation fails, as a test has asked for");
  }
  --*until_failure;
}

// What stands in front of a block.
class Header {
 public:
  explicit Header(std::size_t nbytes) : nbytes(nbytes) {}
  Header(Header&&) = default;
  ~Header() {
    if (unrecorded_) unrecorded_->subtract(nbytes);
  }

  // See Note [Bytes beside operators]
  void count_if_unrecorded() {
    Level* level = current_level();
    if (level == nullptr || !level->unrecorded || !is_intercepting()) return;
    unrecorded_ = level->unrecorded;
    unrecorded_->add(nbytes);
    try {
      const DomainLock lock(level->domain);
      notice_unrecorded(*level);
    } catch (const NoRoom& why) {
      raise_budget_error(why, "a tensor made beside operators");
    }
  }

  const std::size_t nbytes;

 private:
  c10::intrusive_ptr<UnrecordedBytes> unrecorded_;  // null if it counts elsewhere
};

// torch's default CPU allocator, with a header in front of each block. The profiler is told of the
// bytes that were asked for, as without us.
class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    const c10::Device kCpu(c10::kCPU);
    if (nbytes == 0) return {nullptr, nullptr, &release, kCpu};
    fail_if_told_to();
    Header header(nbytes);
    if (running != nullptr) {
      running->allocated(nbytes);
    } else {
      header.count_if_unrecorded();
    }
    auto* block = static_cast<char*>(c10::alloc_cpu(nbytes + kHeader));
    new (block) Header(std::move(header));
    void* data = block + kHeader;
    c10::profiledCPUMemoryReporter().New(data, nbytes);
    return {data, data, &release, kCpu};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }

 private:
  static constexpr std::size_t kHeader = 64;  // keeps the alignment that torch promises
  static_assert(sizeof(Header) <= kHeader);

  static void release(void* data) {
    if (data == nullptr) return;
    char* block = static_cast<char*>(data) - kHeader;
    auto* header = reinterpret_cast<Header*>(block);
    if (running != nullptr) running->freed(header->nbytes);
    header->~Header();
    c10::profiledCPUMemoryReporter().Delete(data);
    c10::free_cpu(block);
  }
};

}  // namespace

Meter::Meter(Table& level, std::size_t granted, const c10::OperatorHandle& op)
    : level_(level),
      granted_(static_cast<std::int64_t>(granted)),
      op_(op),
      outer_(std::exchange(running, this)) {}

Meter::~Meter() { running = outer_; }

// See Note [Scratch is made room for as it is asked for]
void Meter::allocated(std::size_t nbytes) {
  const std::int64_t live = live_ + static_cast<std::int64_t>(nbytes);
  if (live > granted_) {
    running = nullptr;  // what eviction frees is not the operator's
    try {
      level_.domain->make_room(level_, static_cast<std::size_t>(live));
    } catch (const NoRoom& why) {
      running = this;
      refused_ = live;
      raise_budget_error(why, "`" + c10::toString(op_.operator_name()) + "`");
    }
    running = this;
    granted_ = live;
  }
  live_ = live;
  peak_ = std::max(peak_, live_);
}

std::optional<std::size_t> fail_allocation(std::optional<std::size_t> count) {
  install_counting_allocator();
  return std::exchange(until_failure, count);
}

void install_counting_allocator() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Somebody else's allocator stays: then shape inference alone bounds the peak.
    if (c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator()) return;
    c10::SetCPUAllocator(new CountingAllocator, /*priority=*/255);
  });
}

}  // namespace rematfn
