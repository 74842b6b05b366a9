// SPDX-License-Identifier: Apache-2.0
//
// host.h: a tier of pinned memory on the host, for the bytes of accelerators.
//
// Note [Copies are in stream order]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// An accelerator copies in streams of its own, one for each direction, while its kernels run. The host
// waits for nothing: it says which stream waits for what. That is, for each copy:
//   1. The copy out waits for what has been enqueued before: only then are the bytes there.
//   2. Whoever is given the memory of what has gone out waits for the copy out. What is written before
//      that is called back, and has no copy.
//   3. What comes in gets its memory from the current stream, whose earlier kernels may still use what
//      lay there. So the copy in waits for them; and hence, by 2, for the copy out of the same value.
//   4. Whoever reads what comes in waits for the copy in.
//   5. A place in the host's memory is given to another copy out, perhaps for another stream's program.
//      That waits for all that has read the place or written it before.
//   6. What is not wanted any more is not waited for. So the allocator is told which stream still uses
//      its memory.
// The current stream is asked for each time, before a stream of ours is made current for a copy.
//
// Note [Nothing moves while a stream is captured]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A stream that is captured in a graph would have its copies run again with the graph, and it may not wait
// for others. To ask then whether an event has been reached ends the capture. So nothing is begun, what is
// under way stays so, and whoever needs it is told.
//
// Note [Pinned memory is divided by us]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// To pin memory takes milliseconds, and torch's allocator of it rounds up to a power of two. So we ask
// for few chunks, each a power of two, and divide them as if they were one piece. A copy may lie
// across chunks. They are given back with the tier, perhaps while copies are still under way. That
// allocator hands them out again when the streams are done that it was told of; by an address inside of
// a chunk it knows none. So it is told of the chunk, for each copy. (With one device Rule 5 would do: a
// place that is still read has the stream out wait, which has written the first bytes of every chunk.)

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memory/slab.h"

namespace rematfn {

class Host : public std::enable_shared_from_this<Host> {
 public:
  struct Traffic {
    std::size_t bytes = 0;
    std::size_t transfers = 0;
    double seconds = 0;    // of those that are known to be done
    double bandwidth = 0;  // of late, in bytes per second; 0: not known yet
  };
  struct Statistics {
    Traffic out, in;
    std::size_t held = 0;  // in units of Slab::kAlignment
    std::size_t peak_held = 0;
    std::size_t pinned = 0;    // that the system gave
    std::size_t capacity = 0;  // the budget, or what the system would give of it
    double waited = 0;         // seconds that kernels waited for copies, as far as known
  };
  // Of streams, for copies; as found out later, by whoever asks for something next.
  class Waits {
   public:
    void add(double seconds, std::optional<std::uint64_t> late);
    [[nodiscard]] double take_seconds();
    // The numbers of what was late, as precede() was given them.
    [[nodiscard]] std::vector<std::uint64_t> take_late();

   private:
    std::mutex mutex_;
    double seconds_ = 0;
    std::vector<std::uint64_t> late_;
  };
  class Copy;

  // `budget`: a hard cap, in bytes.
  explicit Host(std::size_t budget);

  // Starts to copy the bytes of `from` out, after what runs in `now`. Null if there is no room.
  [[nodiscard]] std::unique_ptr<Copy> copy_out(const c10::Storage& from, const c10::Stream& now);

  // These are cheap: atomic loads.
  [[nodiscard]] bool has_room(std::size_t nbytes) const {
    return nbytes <= room_.load(std::memory_order_relaxed);
  }
  // As in Traffic; if only one is known, they are taken to be the same.
  [[nodiscard]] double bandwidth_out() const;
  [[nodiscard]] double bandwidth_in() const;

  // Why there is less than the budget; empty if there is not.
  [[nodiscard]] std::string trouble() const;
  [[nodiscard]] Statistics statistics();
  // By device: the numbers of the streams out and in.
  [[nodiscard]] std::vector<std::pair<c10::StreamId, c10::StreamId>> streams() const;
  // Whether the current stream of the device is. See Note [Nothing moves while a stream is captured].
  [[nodiscard]] static bool is_captured(c10::Device device);

 private:
  using Mark = std::shared_ptr<const c10::Event>;
  struct Lane {  // of one device
    c10::Stream out, in;
  };
  struct Chunk {
    c10::DataPtr bytes;
    std::size_t begin, end;  // in the slab
  };
  // What is known once `end` has been reached.
  struct Timed {
    Mark begin, end;
    Traffic* traffic;  // null: what lies between is a wait, of `waits`
    std::size_t nbytes;
    std::shared_ptr<Waits> waits;
    std::optional<std::uint64_t> returning;
  };

  [[nodiscard]] const Lane& lane_of(c10::Device device);
  // So that the chunks reach so far; false: there is no memory.
  [[nodiscard]] bool grow_to(std::size_t end, c10::DeviceType type);
  void copy(std::size_t offset, const c10::Storage& storage, bool goes_out,
            const c10::Stream& now) const;
  // `last`: of what has used it, if that is not over.
  void free(std::size_t offset, std::size_t nbytes, const c10::Event* last);
  void note(Timed timed);
  void collect();
  void measure(Traffic& traffic, std::atomic<double>& bandwidth, std::size_t nbytes, double seconds);

  mutable std::mutex mutex_;  // for all below but atomics
  Slab slab_;
  std::vector<Chunk> chunks_;
  std::vector<Lane> lanes_;
  std::deque<Timed> timed_;
  Statistics counts_;
  std::string trouble_;
  std::atomic<std::size_t> room_;
  std::atomic<double> bandwidth_out_{0}, bandwidth_in_{0};
};

// The bytes of one value. To destroy it is to discard it.
class Host::Copy {
 public:
  ~Copy();
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;

  // Whether the stream has done what was begun. While the current one is captured, nobody knows.
  [[nodiscard]] bool is_done() const;
  // What `now` runs from now on comes after it. What it waits is noted, if `waits` is given: of a return,
  // with its number.
  void precede(const c10::Stream& now, const std::shared_ptr<Waits>& waits = nullptr,
               std::optional<std::uint64_t> returning = std::nullopt);
  // Starts to bring the bytes back, into memory from the current stream `now`. Throws OutOfMemoryError.
  void bring_in(const c10::Stream& now);
  // What has come in, or is about to: precede() first.
  [[nodiscard]] c10::Storage take() { return std::move(comes_to_); }
  // `bytes`, which the copy reads or writes, may be freed on another stream than precede() was told of.
  void protect(const c10::DataPtr& bytes) const;

 private:
  friend class Host;
  Copy(std::shared_ptr<Host> host, Lane lane, std::size_t offset, std::size_t nbytes)
      : host_(std::move(host)), lane_(lane), offset_(offset), nbytes_(nbytes) {}

  // Whether its bytes are used no more: it is done, or the device has failed.
  [[nodiscard]] bool is_over() const;

  const std::shared_ptr<Host> host_;
  const Lane lane_;
  const std::size_t offset_, nbytes_;
  Mark done_;
  c10::Storage comes_to_;
};

}  // namespace rematfn
