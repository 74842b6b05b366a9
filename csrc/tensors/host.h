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
#include <utility>
#include <vector>

#include "memory/slab.h"
#include "tensors/tier.h"

namespace rematfn {

class Host final : public Tier, public std::enable_shared_from_this<Host> {
 public:
  // `budget`: a hard cap, in bytes.
  explicit Host(std::size_t budget);

  [[nodiscard]] bool has_room(const c10::Storage& bytes) const override;
  [[nodiscard]] std::unique_ptr<Tier::Copy> put(const c10::Storage& bytes, TensorDomain& domain,
                                                std::shared_ptr<Waits> waits) override;
  // If only one bandwidth is known, they are taken to be the same.
  [[nodiscard]] LinkFigures link() const override;
  [[nodiscard]] std::size_t queued_in() const override { return coming_; }
  [[nodiscard]] TierFigures figures() override;

  // By device: the numbers of the streams out and in.
  [[nodiscard]] std::vector<std::pair<c10::StreamId, c10::StreamId>> streams() const;

 private:
  class Copy;
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
    std::atomic<double>* bandwidth;  // null: what lies between is a wait, of `waits`
    std::size_t nbytes;
    std::shared_ptr<Waits> waits;
    std::optional<Trace::Id> returning;
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

  mutable std::mutex mutex_;  // for all below but atomics
  Slab slab_;
  std::vector<Chunk> chunks_;
  std::vector<Lane> lanes_;
  std::deque<Timed> timed_;
  TierFigures counts_;
  std::atomic<std::size_t> coming_{0};  // bytes
  std::atomic<double> bandwidth_out_{0}, bandwidth_in_{0};
};

}  // namespace rematfn
