// SPDX-License-Identifier: Apache-2.0
//
// captures.h: what a version has to do with graphs.
//
// Note [A captured call keeps to itself]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// What runs on a stream that is captured in a graph does not run: it is written down, to run each time that the
// graph is replayed, at the same addresses. A call that is captured evicts and replays as any other does, and
// the graph has its replays. But the contents of a value that the capture made are there only while the graph
// runs, and then are others each time. So nothing crosses the border of a capture:
//   1. What a capture made is evicted, and made again, within captures alone; what was made outside of them,
//      outside alone. Whoever needs something evicted on the other side gets a ReplayError.
//   2. What was made outside and is read in a capture may not go any more: the graph has its address. Nor may
//      what one side has written where the other made something.
//   3. What a capture's operators read beside that comes from outside of all levels: the caller's static
//      inputs. No counter tells what a graph writes there later. Of what is overwritten between captures a
//      replay in one has no copy.
//   4. Numbers drawn in a capture cannot be drawn again: torch refuses to tell the generator's state. What has
//      drawn them is kept.
//   5. A stream that is captured waits for no event from outside of its capture. torch.cuda.graph() waits for
//      the device before it begins, so that there is nothing to wait for.
//   6. What a backward's capture has brought back is evicted where that of another one begins, whose graph may
//      be replayed without the other: that may have failed. Where captures cannot be told apart, each backward
//      counts as one.
// Else several captures count as one: forward and backward in graphs of their own, as make_graphed_callables()
// has them, run in the order of their captures.

#pragma once

#include <cstdint>

namespace rematfn {

// Where the bytes of a version were made.
struct Capture {
  enum class Side : std::uint8_t { kNone, kOutside, kInside };  // kNone: a CPU's, or the caller's

  Side side = Side::kNone;
  bool is_copy = false;            // of what has been overwritten since
  std::uint64_t brought_back = 0;  // in which capture of a backward; 0: in none
};

}  // namespace rematfn
