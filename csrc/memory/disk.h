// SPDX-License-Identifier: Apache-2.0
//
// disk.h: a tier of bytes on a disk: they are written there and read back beside what else goes on.
//
// Knows no tensor. One file, which nobody else sees and which is divided by a Slab; a few threads,
// started at the first transfer.
//
// Note [Returns go before writes]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A return is waited for, by an operator that reads the value; a write hardly ever is. So what comes
// goes first, except that every fourth transfer is a write if there are any: room that is made too late
// is waited for as well. Where nobody waits yet, threads share themselves between the directions, each
// of which has a bandwidth of its own. What somebody waits for overtakes all that has been asked for
// before. Values are transferred in chunks, so that two threads share a large one, and one that is
// called back need not be written to its end.
//
// Note [No transfer runs across a fork]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A direct read puts bytes into pages that the kernel has taken down by their place in memory. If the
// process forks meanwhile, and then writes to such a page, older kernels give it a copy of the page,
// and what is read comes to the other one: open(2) forbids the two together. So a fork waits for the
// chunks that are under way, and none begins until it is over. Whoever forks may not hold what a waiter
// for a copy needs: that is why these handlers are registered before all others of ours, and so run
// last before the fork.
// In the child the threads do not exist, and the file is the parent's: what was made before is lost
// there, the file is closed, and the first write makes another.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memory/scratch_file.h"
#include "memory/tier_figures.h"

namespace rematfn {

class Disk {
 public:
  struct Options {
    std::string folder;
    std::size_t budget = 0;  // a hard cap, in bytes
    int threads = 2;
    bool direct = true;   // past the page cache, where the file system can
    bool verify = false;  // what comes back is compared with what left, by a checksum
    std::size_t chunk = std::size_t{4} << 20;
    // In bytes per second, for each direction: tests and benchmarks throttle it.
    double bandwidth = std::numeric_limits<double>::infinity();
  };
  class Copy;

  // Throws DiskError if the folder cannot be written to or is memory itself. Makes no file yet.
  explicit Disk(Options options, const FileCalls& calls = {});
  ~Disk();  // copies may outlive it: the file and the threads go with the last of them
  Disk(const Disk&) = delete;
  Disk& operator=(const Disk&) = delete;

  // Starts to write; `bytes` must stay as they are until the copy is done or gone. Null if there is no
  // room, or no disk any more: see `trouble`. `counted`: in the figures.
  [[nodiscard]] std::unique_ptr<Copy> write(const void* bytes, std::size_t nbytes, bool counted = true);

  // These are cheap: atomic loads.
  [[nodiscard]] bool has_room(std::size_t nbytes) const;
  [[nodiscard]] double write_bandwidth() const;  // as in Traffic
  [[nodiscard]] double read_bandwidth() const;
  [[nodiscard]] std::size_t queued_to_read() const;

  // Writes and reads some MiB, so that bandwidths are known; they are not counted otherwise. Returns
  // whether they are known then.
  bool probe();

  // Of `trouble`: where the disk is full before its budget, copies can be made as others go; where it
  // fails, none can be any more.
  [[nodiscard]] TierFigures figures() const;

 private:
  struct State;

  std::shared_ptr<State> state_;
};

// The bytes of one value. To destroy it is to discard it: what is queued is cancelled, what is under
// way is waited for (a chunk), and nothing reads or writes the memory any more. One thread uses a copy
// at a time.
class Disk::Copy {
 public:
  ~Copy();
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;

  [[nodiscard]] std::size_t nbytes() const { return nbytes_; }
  // Whether nothing is under way: wait() returns, or throws, at once. An atomic load.
  [[nodiscard]] bool is_done() const;
  // Until what was begun is done; throws DiskError if it failed. Lets go of the interpreter's lock.
  void wait();
  // Starts to bring the bytes back; the copy stays whole. Only what has been written can be read: wait
  // for it first. Where a return failed it may be tried again.
  void read(void* to);

 private:
  friend class Disk;
  Copy(std::shared_ptr<State> state, std::size_t nbytes, bool counted);

  const std::shared_ptr<State> state_;
  const std::size_t nbytes_;
  const bool counted_;
  std::atomic<bool> done_{true};  // what stands below is its user's then, else the lock's
  bool goes_out_ = false;
  bool written_;                  // as a whole
  std::optional<std::size_t> offset_;
  char* memory_ = nullptr;        // which is only read if it goes out
  std::size_t begun_ = 0;         // its chunks up to here
  unsigned under_way_ = 0;        // of these
  bool awaited_ = false;
  bool full_ = false;             // the disk, as it was written
  std::optional<std::list<Copy*>::iterator> queued_;
  std::string error_;
  std::vector<std::uint64_t> checksums_;  // by chunk
};

}  // namespace rematfn
