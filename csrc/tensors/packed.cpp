// SPDX-License-Identifier: Apache-2.0
#include "tensors/packed.h"

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>

#include "engine/feedback.h"
#include "engine/unrecorded.h"
#include "memory/checksum.h"
#include "memory/packing.h"
#include "memory/pages.h"

namespace rematfn {
namespace {

constexpr std::size_t kWorthPacking = std::size_t{64} << 10;
constexpr std::size_t kWorthThreads = std::size_t{512} << 10;

// Pieces of a value of so many bytes, on the threads of operators.
auto in_pieces_of(std::size_t nbytes) {
  return [nbytes](std::size_t pieces, c10::function_ref<void(std::size_t)> piece) {
    const auto all = static_cast<std::int64_t>(pieces);
    at::parallel_for(0, all, nbytes < kWorthThreads ? all : 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) piece(static_cast<std::size_t>(i));
    });
  };
}

std::atomic<bool> packs_everything{false};

Encoding encoding_of(const c10::Storage& bytes) {
  return Encoding::find(static_cast<const char*>(bytes.data()), bytes.nbytes());
}

class Packed final : public Tier, public std::enable_shared_from_this<Packed> {
 public:
  // Measured on one thread, with ReLU's results.
  explicit Packed(bool verify)
      : Tier("packed memory", /*is_for_accelerators=*/false,
             {.latency = 2e-6, .per_byte_out = 5e-10, .per_byte_in = 3e-10, .clocked = true, .packs = true}),
        verify_(verify) {}

  [[nodiscard]] double packed_share(const c10::Storage& bytes) const override {
    if (packs_everything.load(std::memory_order_relaxed)) return bytes.nbytes() > 0 ? 0.5 : 1;
    if (bytes.nbytes() < kWorthPacking) return 1;
    return encoding_of(bytes).share;
  }
  // Somebody else may share what has another deleter, or hand it out again as it was.
  [[nodiscard]] bool has_room(const c10::Storage& bytes) const override {
    return bytes.data_ptr().get_deleter() == c10::GetCPUAllocator()->raw_deleter();
  }
  [[nodiscard]] std::unique_ptr<Copy> put(const c10::Storage& bytes, TensorDomain&,
                                          std::shared_ptr<Waits> waits) override {
    const Clock::time_point begin = Clock::now();
    std::optional<std::uint64_t> sum;
    if (verify_) sum = checksum(static_cast<const char*>(bytes.data()), bytes.nbytes());
    auto copy = std::make_unique<Bytes>(shared_from_this(), bytes, encoding_of(bytes), waits);
    copy->sum = sum;
    note(account_.out, bytes.nbytes(), begin, *waits, /*returning=*/false);
    return copy;
  }
  [[nodiscard]] TierFigures figures() override {
    const std::lock_guard lock(feedback_mutex());
    return account_.figures();
  }

 private:
  using Clock = std::chrono::steady_clock;

  // It lies at the front of the memory that the value had, whose rest has been cut off.
  class Bytes final : public Tier::Copy {
   public:
    Bytes(std::shared_ptr<Packed> packed, const c10::Storage& of, const Encoding& encoding,
          std::shared_ptr<Waits> waits)
        : Copy(of.nbytes(), of.device(), std::move(waits)),
          packed_(std::move(packed)),
          packing_(encoding, static_cast<char*>(of.mutable_data()), nbytes, in_pieces_of(nbytes)),
          memory_(of.set_data_ptr(c10::DataPtr(nullptr, of.device()))) {
      cut_off();
      const std::lock_guard lock(feedback_mutex());
      packed_->account_.hold(bytes_here());
    }
    ~Bytes() override {
      const std::lock_guard lock(feedback_mutex());
      packed_->account_.release(bytes_here());
    }

    [[nodiscard]] std::size_t bytes_here() const override {
      return allocated_ + packing_.index_bytes();
    }
    [[nodiscard]] bool is_done() const override { return true; }
    void wait(bool) override {}
    void get(c10::Storage to) override {
      const Clock::time_point begin = Clock::now();
      auto* const bytes = static_cast<char*>(to.mutable_data());
      packing_.unpack(static_cast<const char*>(memory_.get()), bytes, in_pieces_of(nbytes));
      if (sum && checksum(bytes, nbytes) != *sum) {
        throw CopyLost("rematfn.Packed(): " + std::to_string(nbytes) +
                       " bytes were packed, and others came out: something has written to the memory where they "
                       "lay.");
      }
      packed_->note(packed_->account_.in, nbytes, begin, *waits_, /*returning=*/true);
      comes_to_ = std::move(to);
    }
    void turn_back() override { comes_to_ = c10::Storage(); }
    void read(std::size_t begin, std::size_t count, char* to) const override {
      packing_.unpack(static_cast<const char*>(memory_.get()), begin, count, to);
    }

   private:
    // A block that is not of our pool keeps its length: then the packed bytes are copied, and it goes, if there
    // is memory for both.
    void cut_off() {
      void* const data = memory_.get();
      const std::size_t left = std::max<std::size_t>(packing_.packed_bytes(), 1);
      allocated_ = left;
      if (const auto label = pages().shrink(data, left)) {
        c10::profiledCPUMemoryReporter().Delete(data);
        c10::profiledCPUMemoryReporter().New(data, left);
        if (label->owner != nullptr) static_cast<UnrecordedBytes*>(label->owner)->subtract(label->nbytes - left);
        return;
      }
      try {
        c10::DataPtr shorter = c10::GetDefaultCPUAllocator()->allocate(left);
        std::memcpy(shorter.get(), data, left);
        memory_ = std::move(shorter);
      } catch (const c10::Error&) {
        allocated_ = nbytes;
      }
    }

    const std::shared_ptr<Packed> packed_;
    const Packing packing_;
    c10::DataPtr memory_;
    std::size_t allocated_ = 0;  // of it
  };

  [[nodiscard]] const TierAccount& account() const override { return account_; }
  void note(TierAccount::Traffic& traffic, std::size_t nbytes, Clock::time_point begin, Waits& waits,
            bool returning) {
    const std::chrono::duration<double> took = Clock::now() - begin;
    waits.add(took.count(), returning);
    const std::lock_guard lock(feedback_mutex());
    traffic.bytes += nbytes;
    traffic.note(nbytes, took.count());
  }

  const bool verify_;
  // All below is used under feedback_mutex(), which a fork waits for: the child goes on with what was packed.
  TierAccount account_{std::numeric_limits<std::size_t>::max()};
};

}  // namespace

void pack_everything(bool on) { packs_everything = on; }

std::shared_ptr<Tier> make_packed(bool verify) { return std::make_shared<Packed>(verify); }

}  // namespace rematfn
