// SPDX-License-Identifier: Apache-2.0
#include "tensors/host.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "base/errors.h"
#include "base/interpreter.h"
#include "tensors/level_tensor.h"
#include "tensors/thread_keys.h"
#include "tensors/torch_compat.h"

namespace rematfn {
namespace {

constexpr std::size_t kLeastChunk = std::size_t{16} << 20;
constexpr std::size_t kChunksOfAll = 32;  // a chunk is so much of what there is already
constexpr std::size_t kTelling = std::size_t{64} << 10;  // bytes: less says nothing of a bandwidth
constexpr double kNewest = 0.3;  // its weight in a bandwidth
constexpr double kMilliseconds = 1e-3;

const c10::impl::DeviceGuardImplInterface& guard_of(c10::Device device) {
  return *c10::impl::getDeviceGuardImpl(device.type());
}

// One whose time can be told.
std::shared_ptr<const c10::Event> mark(const c10::Stream& stream) {
  auto event = std::make_shared<c10::Event>(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT);
  event->record(stream);
  return event;
}

// A device that has failed says so to whoever asks it for something. Who lets go is often a destructor.
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
  return is_capturing(guard, guard.getStream(device));
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

}  // namespace

class Host::Copy final : public Tier::Copy {
 public:
  Copy(std::shared_ptr<Host> host, TensorDomain& domain, std::shared_ptr<Waits> waits, Lane lane,
       std::size_t offset, std::size_t nbytes)
      : host_(std::move(host)),
        domain_(domain),
        waits_(std::move(waits)),
        lane_(lane),
        offset_(offset),
        nbytes_(nbytes) {}
  // What is leaving may be freed now. See Note [Copies are in stream order], 6.
  ~Copy() override {
    if (!done_) return;  // it was never begun
    if (leaves) protect(leaves.data_ptr());
    if (comes_to_) protect(take().data_ptr());
    host_->free(offset_, nbytes_, is_over() ? nullptr : done_.get());
  }

  // Whether the stream has done what was begun. While the current one is captured, nobody knows.
  [[nodiscard]] bool is_done() const override {
    return !is_captured(lane_.out.device()) && done_->query();
  }

  // See Note [Copies are in stream order], 2 and 4
  void wait(std::optional<Trace::Id> returning) override {
    refuse_if_captured(lane_.out.device());
    const c10::Stream now = enter(domain_, lane_.out.device());
    if (leaves && domain_.streams.are_several()) protect(leaves.data_ptr());
    if (is_done()) return;
    {
      const std::lock_guard lock(host_->mutex_);
      host_->timed_.push_back({mark(now), done_, nullptr, nbytes_, waits_, returning});
    }
    done_->block(now);
  }

  void bring_back() override {
    const c10::Device device = lane_.in.device();
    refuse_if_captured(device);
    const c10::Stream now = enter(domain_, device);
    const c10::DeviceGuard on(device);
    comes_to_ = c10::Storage(c10::Storage::use_byte_size_t(), nbytes_, c10::GetAllocator(device.type()),
                             /*resizable=*/true);
    host_->coming_ += nbytes_;
    const std::lock_guard lock(host_->mutex_);
    host_->collect();
    mark(now)->block(lane_.in);  // 3
    const Mark begin = mark(lane_.in);
    {
      const c10::StreamGuard in_stream(lane_.in);
      host_->copy(offset_, comes_to_, /*goes_out=*/false, lane_.in);
    }
    done_ = mark(lane_.in);
    host_->counts_.in.bytes += nbytes_;
    host_->timed_.push_back({begin, done_, &host_->bandwidth_in_, nbytes_, nullptr, std::nullopt});
  }

  [[nodiscard]] c10::Storage take() override {
    host_->coming_ -= nbytes_;
    return std::move(comes_to_);
  }

  void turn_back() override {
    const c10::Stream now = enter(domain_, lane_.in.device());
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
    const auto& guard = guard_of(lane_.out.device());
    for (const c10::Stream& user : {lane_.out, lane_.in}) guard.recordDataPtrOnStream(bytes, user);
  }

  const std::shared_ptr<Host> host_;
  TensorDomain& domain_;
  const std::shared_ptr<Waits> waits_;
  const Lane lane_;
  const std::size_t offset_, nbytes_;
  Mark done_;
  c10::Storage comes_to_;
};

Host::Host(std::size_t budget)
    : Tier("host", /*is_for_accelerators=*/true), slab_(budget) {}

bool Host::has_room(const c10::Storage& bytes) const {
  return bytes.nbytes() > 0 && bytes.nbytes() <= slab_.largest() && !is_captured(bytes.device());
}

// See Note [Copies are in stream order]
std::unique_ptr<Tier::Copy> Host::put(const c10::Storage& from, TensorDomain& domain,
                                      std::shared_ptr<Waits> waits) {
  const c10::Stream now = enter(domain, from.device());
  std::unique_ptr<Copy> copy;
  bool is_first = false;
  {
    const std::lock_guard lock(mutex_);
    collect();
    const std::size_t nbytes = from.nbytes();
    const std::optional<std::size_t> offset = slab_.allocate(nbytes);
    if (!offset) return nullptr;
    if (!grow_to(*offset + Slab::rounded(nbytes), from.device_type())) {
      slab_.free(*offset, nbytes);
      slab_.set_capacity(counts_.pinned);
      return nullptr;
    }
    counts_.peak_held = std::max(counts_.peak_held, slab_.held());
    const Lane lane = lane_of(from.device());
    copy = std::make_unique<Copy>(shared_from_this(), domain, std::move(waits), lane, *offset, nbytes);
    mark(now)->block(lane.out);  // 1
    const Mark begin = mark(lane.out);
    {
      const c10::StreamGuard in_stream(lane.out);
      this->copy(*offset, from, /*goes_out=*/true, lane.out);
    }
    copy->done_ = mark(lane.out);
    counts_.out.bytes += nbytes;
    timed_.push_back({begin, copy->done_, &bandwidth_out_, nbytes, nullptr, std::nullopt});
    is_first = bandwidth_out_ == 0 && nbytes >= kTelling;
  }
  if (is_first) {  // the only one that is waited for, so that its time is known at once
    const detail::WithoutInterpreter scope;
    copy->done_->synchronize();
  }
  return copy;
}

const Host::Lane& Host::lane_of(c10::Device device) {
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

// See Note [Pinned memory is divided by us]
bool Host::grow_to(std::size_t end, c10::DeviceType type) {
  while (counts_.pinned < end) {
    const std::size_t wanted =
        std::max({end - counts_.pinned, kLeastChunk, counts_.pinned / kChunksOfAll});
    const std::size_t most = std::bit_floor(slab_.capacity() - counts_.pinned);
    std::size_t size = std::min(std::bit_floor(wanted), most);
    if (size < end - counts_.pinned && 2 * size <= most) size *= 2;
    c10::DataPtr bytes;
    try {
      bytes = at::getHostAllocator(type)->allocate(size);
    } catch (const std::exception& error) {
      counts_.trouble = "no more memory can be pinned: " + std::string(error.what());
      return false;
    }
    const std::size_t begin = std::exchange(counts_.pinned, counts_.pinned + size);
    chunks_.push_back({std::move(bytes), begin, counts_.pinned});
  }
  return true;
}

// In the stream `now`, which is the current one. See Note [Pinned memory is divided by us].
void Host::copy(std::size_t offset, const c10::Storage& storage, bool goes_out,
                const c10::Stream& now) const {
  const BackendScope scope;
  std::size_t done = 0;
  auto chunk = std::ranges::partition_point(chunks_, [&](const Chunk& c) { return c.end <= offset; });
  for (; done < storage.nbytes(); ++chunk) {
    const std::size_t begin = offset + done - chunk->begin;
    const std::size_t nbytes = std::min(storage.nbytes() - done, chunk->end - chunk->begin - begin);
    const at::Tensor here = at::from_blob(static_cast<char*>(chunk->bytes.get()) + begin,
                                          {static_cast<std::int64_t>(nbytes)},
                                          at::TensorOptions(at::kByte).device(at::kCPU));
    const at::Tensor there = bytes_of(storage, done, nbytes);
    (goes_out ? here : there).copy_(goes_out ? there : here, /*non_blocking=*/true);
    at::getHostAllocator(now.device_type())
        ->record_event(chunk->bytes.get(), chunk->bytes.get_context(), now);
    done += nbytes;
  }
}

// See Note [Copies are in stream order], 5
void Host::free(std::size_t offset, std::size_t nbytes, const c10::Event* last) {
  const std::lock_guard lock(mutex_);
  if_the_device_works([&] {
    if (last == nullptr) return;
    for (const Lane& lane : lanes_) last->block(lane.out);
  });
  slab_.free(offset, nbytes);
}

LinkFigures Host::link() const {
  constexpr double kLatency = 2e-5;
  constexpr double kUnknown = 1e10;
  const double out = bandwidth_out_;
  const double in = bandwidth_in_;
  return {.latency = kLatency,
          .per_byte_out = seconds_per_byte(out > 0 ? out : in, kUnknown),
          .per_byte_in = seconds_per_byte(in > 0 ? in : out, kUnknown)};
}

TierFigures Host::figures() {
  const std::lock_guard lock(mutex_);
  collect();
  counts_.held = slab_.held();
  counts_.capacity = slab_.capacity();
  counts_.out.bandwidth = bandwidth_out_;
  counts_.in.bandwidth = bandwidth_in_;
  return counts_;
}

std::vector<std::pair<c10::StreamId, c10::StreamId>> Host::streams() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<c10::StreamId, c10::StreamId>> found;
  for (const Lane& lane : lanes_) found.emplace_back(lane.out.id(), lane.in.id());
  return found;
}

// ---- times ------------------------------------------------------------------------------------

void Host::collect() {
  if (std::ranges::any_of(lanes_, [](const Lane& l) { return is_captured(l.out.device()); })) return;
  while (!timed_.empty() && timed_.front().begin->query() && timed_.front().end->query()) {
    const Timed timed = std::move(timed_.front());
    timed_.pop_front();
    const double seconds = kMilliseconds * timed.begin->elapsedTime(*timed.end);
    if (seconds <= 0) continue;  // it was there in time
    if (timed.bandwidth == nullptr) {
      counts_.waited += seconds;
      timed.waits->add(seconds, timed.returning);
    } else if (timed.nbytes >= kTelling) {
      const double now = static_cast<double>(timed.nbytes) / seconds;
      std::atomic<double>& of_late = *timed.bandwidth;
      of_late = of_late == 0 ? now : 1 / ((1 - kNewest) / of_late + kNewest / now);
    }
  }
}

}  // namespace rematfn
