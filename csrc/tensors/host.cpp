// SPDX-License-Identifier: Apache-2.0
#include "tensors/host.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <bit>
#include <deque>
#include <mutex>
#include <optional>

#include "base/errors.h"
#include "tensors/level_tensor.h"
#include "tensors/thread_keys.h"
#include "tensors/torch_compat.h"

namespace rematfn {
namespace {

constexpr std::size_t kLeastChunk = std::size_t{16} << 20;
constexpr std::size_t kChunksOfAll = 32;  // a chunk is so much of what there is already
constexpr double kMilliseconds = 1e-3;

const c10::impl::DeviceGuardImplInterface& guard_of(c10::Device device) {
  return *c10::impl::getDeviceGuardImpl(device.type());
}

using Mark = std::shared_ptr<const c10::Event>;

// One whose time can be told.
Mark mark(const c10::Stream& stream) {
  auto event = std::make_shared<c10::Event>(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT);
  event->record(stream);
  return event;
}

// A device that has failed says so to whoever asks it for something. Who frees is often a destructor.
template <class F>
void if_the_device_works(F&& tell) noexcept {
  try {
    tell();
  } catch (const std::exception&) {
  }
}

// Whether the current stream of the device is. See Note [Nothing moves while a stream is captured].
bool is_captured(c10::Device device) {
  const c10::impl::DeviceGuardImplInterface& guard = guard_of(device);
  return capture_of(guard, guard.getStream(device)) != 0;
}

// See Note [Nothing moves while a stream is captured]
void refuse_if_captured(c10::Device device) {
  if (!is_captured(device)) return;
  raise(ErrorKind::kOffload,
        "A value that was moved to the host, or is on its way, is needed while a stream is captured in a "
        "graph. Call rematfn.materialize(x) on what the capture reads before it begins, raise the budget, "
        "or capture a function that moves nothing.");
}

// The current stream of a device, after which all that the domain has run is over.
c10::Stream enter(TensorDomain& domain, c10::Device device) {
  domain.streams.enter(device);
  return guard_of(device).getStream(device);
}

class Host final : public Tier, public std::enable_shared_from_this<Host> {
 public:
  explicit Host(std::size_t budget)
      : Tier("host", /*is_for_accelerators=*/true,
             {.latency = 2e-5, .per_byte_out = 1e-10, .per_byte_in = 1e-10}),
        account_(budget) {}

  [[nodiscard]] bool has_room(const c10::Storage& bytes) const override {
    return bytes.nbytes() > 0 && Tier::has_room(bytes) && !is_captured(bytes.device());
  }
  // See Note [Copies are in stream order]
  [[nodiscard]] std::unique_ptr<Copy> put(const c10::Storage& from, TensorDomain& domain,
                                          std::shared_ptr<Waits> waits) override {
    const c10::Stream now = enter(domain, from.device());
    const std::lock_guard lock(mutex_);
    const std::size_t nbytes = from.nbytes();
    const std::optional<std::size_t> offset = account_.take(nbytes);
    if (!offset) return nullptr;
    if (!grow_to(*offset + TierAccount::rounded(nbytes), from.device_type())) {
      account_.give_back(*offset, nbytes);
      return nullptr;
    }
    const Lane& lane = lane_of(from.device());
    auto copy = std::make_unique<Bytes>(shared_from_this(), domain, from, std::move(waits), lane, *offset);
    copy->done_ = this->copy(*offset, from, /*out=*/true, now, lane.out);
    return copy;
  }
  [[nodiscard]] TierFigures figures() override {
    const std::lock_guard lock(mutex_);
    collect();
    TierFigures found = account_.figures();
    found.pinned = pinned_;
    found.waited = waited_;
    return found;
  }

 private:
  friend std::vector<std::pair<c10::StreamId, c10::StreamId>> rematfn::streams_of(const Tier& host);
  struct Lane {  // of one device
    c10::Stream out, in;
  };
  struct Chunk {
    c10::DataPtr bytes;
    std::size_t begin, end;  // in the account
  };
  // What is known once `end` has been reached.
  struct Timed {
    Mark begin, end;
    TierAccount::Traffic* traffic;  // null: what lies between is a wait, of `waits`
    std::size_t nbytes;
    std::shared_ptr<Waits> waits;
    bool returning;
  };

  class Bytes final : public Tier::Copy {
   public:
    Bytes(std::shared_ptr<Host> host, TensorDomain& domain, const c10::Storage& of,
          std::shared_ptr<Waits> waits, const Lane& lane, std::size_t offset)
        : Copy(of.nbytes(), of.device(), std::move(waits)),
          host_(std::move(host)),
          domain_(domain),
          lane_(lane),
          offset_(offset) {}
    // What is leaving may be freed now. See Note [Copies are in stream order], 6.
    ~Bytes() override {
      if (!done_) return;  // it was never begun
      if (leaves) protect(leaves.data_ptr());
      if (comes_to_) protect(take().data_ptr());
      host_->free(offset_, nbytes, is_over() ? nullptr : done_.get());
    }

    // Whether the stream has done what was begun. While the current one is captured, nobody knows.
    [[nodiscard]] bool is_done() const override { return !is_captured(device) && done_->query(); }

    // See Note [Copies are in stream order], 2 and 4
    void wait(bool returning) override {
      refuse_if_captured(device);
      const c10::Stream now = enter(domain_, device);
      if (leaves && domain_.streams.are_several()) protect(leaves.data_ptr());
      if (is_done()) return;
      {
        const std::lock_guard lock(host_->mutex_);
        host_->timed_.push_back({mark(now), done_, nullptr, nbytes, waits_, returning});
      }
      done_->block(now);
    }

    void get(c10::Storage to) override {
      refuse_if_captured(device);
      const c10::Stream now = enter(domain_, device);
      comes_to_ = std::move(to);
      host_->account_.in.queued += nbytes;
      const std::lock_guard lock(host_->mutex_);
      done_ = host_->copy(offset_, comes_to_, /*out=*/false, now, lane_.in);
    }

    [[nodiscard]] c10::Storage take() override {
      host_->account_.in.queued -= nbytes;
      return std::move(comes_to_);
    }

    void turn_back() override {
      const c10::Stream now = enter(domain_, device);
      if (!is_done()) done_->block(now);
      const c10::Storage room = take();
      if (domain_.streams.are_several()) protect(room.data_ptr());
    }

   private:
    friend class Host;

    // Whether its bytes are used no more: it is done, or the device has failed.
    [[nodiscard]] bool is_over() const {
      bool over = true;
      if_the_device_works([&] { over = is_done(); });
      return over;
    }

    // `bytes`, which the copy reads or writes, may be freed on another stream than the current one.
    // See Note [Copies are in stream order], 6
    void protect(const c10::DataPtr& bytes) const {
      if (is_over()) return;
      const auto& guard = guard_of(device);
      for (const c10::Stream& user : {lane_.out, lane_.in}) guard.recordDataPtrOnStream(bytes, user);
    }

    const std::shared_ptr<Host> host_;
    TensorDomain& domain_;
    const Lane lane_;
    const std::size_t offset_;
    Mark done_;
  };

  [[nodiscard]] const TierAccount& account() const override { return account_; }

  [[nodiscard]] const Lane& lane_of(c10::Device device) {
    const auto lane = std::ranges::find_if(lanes_, [&](const Lane& l) { return l.out.device() == device; });
    if (lane != lanes_.end()) return *lane;
    const auto& guard = guard_of(device);
    const c10::DeviceGuard on(device);
    const c10::Stream out = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/false);
    for (const Lane& other : lanes_) {  // 5: places that were given back before
      mark(other.out)->block(out);
      mark(other.in)->block(out);
    }
    return lanes_.emplace_back(out, guard.getStreamFromGlobalPool(device, /*isHighPriority=*/false));
  }

  // So that the chunks reach so far; false: there is no memory. See Note [Pinned memory is divided by us]
  [[nodiscard]] bool grow_to(std::size_t end, c10::DeviceType type) {
    while (pinned_ < end) {
      const std::size_t wanted = std::max({end - pinned_, kLeastChunk, pinned_ / kChunksOfAll});
      const std::size_t most = std::bit_floor(account_.capacity() - pinned_);
      std::size_t size = std::min(std::bit_floor(wanted), most);
      if (size < end - pinned_ && 2 * size <= most) size *= 2;
      c10::DataPtr bytes;
      try {
        bytes = at::getHostAllocator(type)->allocate(size);
      } catch (const std::exception& error) {
        account_.limit(pinned_, "no more memory can be pinned: " + std::string(error.what()));
        return false;
      }
      chunks_.push_back({std::move(bytes), pinned_, pinned_ + size});
      pinned_ += size;
    }
    return true;
  }

  // In one of our streams, after what the current one has been given. Returns when that is done.
  // See Note [Copies are in stream order], 1 and 3, and Note [Pinned memory is divided by us]
  [[nodiscard]] Mark copy(std::size_t offset, const c10::Storage& storage, bool out, const c10::Stream& now,
                          const c10::Stream& stream) {
    collect();
    const std::size_t all = storage.nbytes();
    mark(now)->block(stream);
    Mark begin = mark(stream);
    {
      const BackendScope scope;
      const c10::StreamGuard in_stream(stream);
      auto chunk = std::ranges::partition_point(chunks_, [&](const Chunk& c) { return c.end <= offset; });
      for (std::size_t done = 0; done < all; ++chunk) {
        const std::size_t at = offset + done - chunk->begin;
        const std::size_t nbytes = std::min(all - done, chunk->end - chunk->begin - at);
        const at::Tensor here = at::from_blob(static_cast<char*>(chunk->bytes.get()) + at,
                                              {static_cast<std::int64_t>(nbytes)},
                                              at::TensorOptions(at::kByte).device(at::kCPU));
        const at::Tensor there = bytes_of(storage, done, nbytes);
        (out ? here : there).copy_(out ? there : here, /*non_blocking=*/true);
        at::getHostAllocator(stream.device_type())
            ->record_event(chunk->bytes.get(), chunk->bytes.get_context(), stream);
        done += nbytes;
      }
    }
    Mark end = mark(stream);
    TierAccount::Traffic& traffic = out ? account_.out : account_.in;
    traffic.bytes += all;
    timed_.push_back({std::move(begin), end, &traffic, all, nullptr, false});
    return end;
  }

  // `last`: of what has used it, if that is not over. See Note [Copies are in stream order], 5
  void free(std::size_t offset, std::size_t nbytes, const c10::Event* last) {
    const std::lock_guard lock(mutex_);
    if_the_device_works([&] {
      if (last == nullptr) return;
      for (const Lane& lane : lanes_) last->block(lane.out);
    });
    account_.give_back(offset, nbytes);
  }

  void collect() {
    if (std::ranges::any_of(lanes_, [](const Lane& l) { return is_captured(l.out.device()); })) return;
    while (!timed_.empty() && timed_.front().begin->query() && timed_.front().end->query()) {
      const Timed timed = std::move(timed_.front());
      timed_.pop_front();
      const double seconds = kMilliseconds * timed.begin->elapsedTime(*timed.end);
      if (seconds <= 0) continue;  // it was there in time
      if (timed.traffic == nullptr) {
        waited_ += seconds;
        timed.waits->add(seconds, timed.returning);
      } else {
        timed.traffic->note(timed.nbytes, seconds);
      }
    }
  }

  mutable std::mutex mutex_;  // for all below
  TierAccount account_;
  std::vector<Chunk> chunks_;
  std::vector<Lane> lanes_;
  std::deque<Timed> timed_;
  std::size_t pinned_ = 0;
  double waited_ = 0;
};

}  // namespace

std::shared_ptr<Tier> make_host(std::size_t budget) { return std::make_shared<Host>(budget); }

std::vector<std::pair<c10::StreamId, c10::StreamId>> streams_of(const Tier& host) {
  const auto& its = dynamic_cast<const Host&>(host);
  const std::lock_guard lock(its.mutex_);
  std::vector<std::pair<c10::StreamId, c10::StreamId>> found;
  for (const Host::Lane& lane : its.lanes_) found.emplace_back(lane.out.id(), lane.in.id());
  return found;
}

}  // namespace rematfn
