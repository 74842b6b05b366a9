// SPDX-License-Identifier: Apache-2.0
#include "tensors/disk_tier.h"

#include <c10/core/CPUAllocator.h>

#include <chrono>
#include <utility>

#include "memory/pages.h"
#include "tensors/profiled.h"

namespace rematfn {

namespace {

class DiskCopy final : public Tier::Copy {
 public:
  DiskCopy(std::unique_ptr<Disk::Copy> copy, std::shared_ptr<Tier::Waits> waits)
      : waits_(std::move(waits)), copy_(std::move(copy)) {}
  // A chunk that is under way is waited for.
  ~DiskCopy() override {
    time(std::nullopt, [&] { copy_.reset(); });
  }

  [[nodiscard]] bool is_done() const override { return copy_->is_done(); }

  void wait(std::optional<Trace::Id> returning) override {
    std::optional<Profiled> range;
    if (!is_done()) range.emplace("rematfn::wait", returning ? "from the disk" : "to the disk");
    or_lost([&] { time(returning, [&] { copy_->wait(); }); });
  }

  void bring_back() override {
    const WillBeFilled filled;
    comes_to_ = c10::Storage(c10::Storage::use_byte_size_t(), copy_->nbytes(), c10::GetCPUAllocator(),
                             /*resizable=*/true);
    or_lost([&] { copy_->read(comes_to_.mutable_data()); });
  }

  [[nodiscard]] c10::Storage take() override { return std::move(comes_to_); }

  void turn_back() override {
    try {
      copy_->wait();
    } catch (const DiskError&) {
      // whoever asks for it will hear of it
    }
    comes_to_ = c10::Storage();
  }

 private:
  template <class F>
  void time(std::optional<Trace::Id> returning, const F& wait) {
    if (is_done()) return wait();
    const auto before = std::chrono::steady_clock::now();
    wait();
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - before;
    waits_->add(waited.count(), returning);
  }

  template <class F>
  void or_lost(const F& ask) {
    try {
      ask();
    } catch (const DiskError& error) {
      comes_to_ = c10::Storage();
      throw CopyLost(error.what());
    }
  }

  const std::shared_ptr<Tier::Waits> waits_;
  c10::Storage comes_to_;  // it lives longer than what writes there
  std::unique_ptr<Disk::Copy> copy_;
};

class DiskTier final : public Tier {
 public:
  explicit DiskTier(Disk::Options options)
      : Tier("disk", /*is_for_accelerators=*/false), disk_(std::move(options)) {}

  [[nodiscard]] bool has_room(const c10::Storage& bytes) const override {
    return disk_.has_room(bytes.nbytes());
  }

  [[nodiscard]] std::unique_ptr<Copy> put(const c10::Storage& bytes, TensorDomain&,
                                          std::shared_ptr<Waits> waits) override {
    auto copy = disk_.write(bytes.data(), bytes.nbytes());
    return copy ? std::make_unique<DiskCopy>(std::move(copy), std::move(waits)) : nullptr;
  }

  [[nodiscard]] LinkFigures link() const override {
    constexpr double kLatency = 1e-4;
    constexpr double kUnknown = 1e9;
    // Measured: on two cores, kept busy in both directions, a step takes 1.18 of its time.
    constexpr double kDrag = 0.18;
    return {.latency = kLatency,
            .per_byte_out = seconds_per_byte(disk_.write_bandwidth(), kUnknown),
            .per_byte_in = seconds_per_byte(disk_.read_bandwidth(), kUnknown),
            .one_way_at_a_time = true,
            .drag = kDrag,
            .clocked = true};
  }

  // On the disk of one machine a probe took 0.06 to 0.11 s.
  void find_bandwidth() override {
    if (disk_.read_bandwidth() == 0) disk_.probe();
  }

  [[nodiscard]] std::size_t queued_in() const override { return disk_.queued_to_read(); }
  [[nodiscard]] TierFigures figures() override { return disk_.figures(); }

 private:
  Disk disk_;
};

}  // namespace

std::shared_ptr<Tier> make_disk_tier(Disk::Options options) {
  return std::make_shared<DiskTier>(std::move(options));
}

}  // namespace rematfn
