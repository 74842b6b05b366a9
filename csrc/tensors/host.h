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

#include <c10/core/Stream.h>

#include <memory>
#include <utility>
#include <vector>

#include "tensors/tier.h"

namespace rematfn {

// `budget`: a hard cap, in bytes. Copies hold the tier.
[[nodiscard]] std::shared_ptr<Tier> make_host(std::size_t budget);

// By device: the numbers of the streams that a host's copies go out and come in on.
[[nodiscard]] std::vector<std::pair<c10::StreamId, c10::StreamId>> streams_of(const Tier& host);

}  // namespace rematfn
