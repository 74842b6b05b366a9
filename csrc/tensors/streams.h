// SPDX-License-Identifier: Apache-2.0
//
// streams.h: the streams of accelerators that a level's operators run on.
//
// Note [A level's work is in one order]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A kernel runs when its stream comes to it. A program that uses two streams says by events what has
// to wait for what, but it does not know of replays. A value made on one stream may be made again on
// another, later than the event that its readers have waited for; what a replay reads may be
// overwritten by a stream that waits for the first run alone; and bytes that are evicted may be handed
// out again while another stream reads them. To tell of each version who made it and who reads it
// would take events for each operator, and most programs use one stream. So the work of a domain is in
// the order in which the host gives it: where it goes on in another stream than before, that one waits
// for the last. This is one comparison for each operator, and no event while the stream stays the
// same; what a program runs in a level on several streams does not overlap. From the second stream on,
// each use of a block is told to its allocator. And since what leaves a level may have been made again
// on the way, all of its streams wait then.
//
// An event that the program recorded in the level says nothing of bytes that were made again after it;
// a stream that the level has not seen has to wait for one that it has, once the level is over.
//
// The current stream is asked for at each call: it is the thread's, and autograd changes it for each
// node.

#pragma once

#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <vector>

namespace rematfn {

class Streams {
 public:
  // Whether anything has run on an accelerator, and on which.
  [[nodiscard]] bool any() const { return !used_.empty(); }
  [[nodiscard]] std::vector<c10::Device> devices() const;
  // Whether some device was used by more than one.
  [[nodiscard]] bool are_several() const { return several_; }
  // What is enqueued from now on, on the current stream of `device`, comes after all that was before.
  void enter(c10::Device device) {
    if (!device.is_cpu()) enter_current(device);
  }
  // Whether the stream that was entered last was captured then. See Note [A captured call keeps to itself].
  [[nodiscard]] bool is_captured() const { return capture_ != 0; }
  // In which; capture_of() has the numbers.
  [[nodiscard]] std::uint64_t capture() const { return capture_; }
  // The same, of the streams that are current now.
  void see_captures();
  // The current stream is about to read or write the bytes of `storage`.
  void note_use(const c10::StorageImpl& storage) const {
    if (several_) tell_allocator(storage.data_ptr());
  }
  // Every stream waits for what has been enqueued by now.
  void settle();

 private:
  struct Used {
    c10::Stream last;
    std::vector<c10::Stream> others;
  };

  void enter_current(c10::Device device);
  static void tell_allocator(const c10::DataPtr& bytes);

  std::vector<Used> used_;  // one for each device
  bool several_ = false;
  std::uint64_t capture_ = 0;
};

}  // namespace rematfn
