// SPDX-License-Identifier: Apache-2.0
//
// disk_state.h: what the threads of a disk share: the queues, and who transfers what next.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "memory/disk.h"
#include "memory/scratch_file.h"
#include "memory/slab.h"

namespace rematfn {

struct Disk::Transfer {
  std::size_t nbytes = 0;
  bool counted = true;           // in the statistics
  std::atomic<bool> done{true};  // what stands below is its user's then, else the lock's
  bool goes_out = false;
  bool written = false;          // as a whole
  std::optional<std::size_t> offset;
  char* memory = nullptr;        // which is only read if it goes out
  std::size_t begun = 0;         // its chunks up to here
  unsigned under_way = 0;        // of these
  bool awaited = false;
  bool full = false;             // the disk, as it was written
  std::optional<std::list<Transfer*>::iterator> queued;
  std::string error;
  std::vector<std::uint64_t> checksums;  // by chunk
};

class Disk::State {
 public:
  using Clock = std::chrono::steady_clock;

  // One direction.
  struct Lane {
    std::atomic<std::size_t> queued{0};  // bytes
    std::atomic<double> bandwidth{0};

    // The lock's:
    std::list<Transfer*> queue;  // those with chunks that have not begun
    unsigned under_way = 0;      // chunks
    Traffic traffic;
    Clock::time_point since;  // the time of what is under way is counted up to here
    Clock::time_point due;    // throttled: what has begun takes until then
    double recent_bytes = 0;
    double recent_seconds = 0;
  };

  // Known to whoever forks.
  static std::shared_ptr<State> make(Options options, const FileCalls& calls, Disk* disk);
  State(Options options, const FileCalls& calls);
  ~State();  // no copy is left
  void leave();  // the disk is gone

  [[nodiscard]] bool write(Transfer& transfer, const char* bytes);
  void read(Transfer& transfer, char* to);
  void wait(Transfer& transfer);
  void discard(Transfer& transfer);

  [[nodiscard]] bool is_lost() const { return lost_.load(std::memory_order_relaxed); }
  void throw_if_lost() const;
  [[nodiscard]] std::size_t room() const { return room_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::string trouble() const;
  [[nodiscard]] Statistics statistics() const;

  Lane out;
  Lane in;

 private:
  struct Chunk {
    Transfer* transfer = nullptr;
    std::size_t begin = 0;
    std::size_t nbytes = 0;
  };
  struct Forks;

  // A thread, which wakes the next if there is more to do: where all cores are busy, one that wakes
  // takes an operator's place. The lock is not held, since it would wake only to wait for that.
  void wake_one() { work_.notify_one(); }
  // The lock is held.
  [[nodiscard]] bool is_open();  // and opens it, at first
  void enqueue(Transfer& transfer, bool goes_out, char* memory);
  void dequeue(Transfer& transfer);
  [[nodiscard]] Lane& lane_of(const Transfer& transfer) { return transfer.goes_out ? out : in; }
  [[nodiscard]] std::size_t next_chunk(const Lane& lane) const;
  [[nodiscard]] Clock::time_point ready(const Lane& lane) const;
  [[nodiscard]] Lane* choose(Clock::time_point now);
  [[nodiscard]] Chunk begin(Lane& lane, Clock::time_point now);
  void finish(const Chunk& chunk, int error);
  void measure(Lane& lane, const Chunk& chunk);
  void conclude(Transfer& transfer);
  void free_slot(Transfer& transfer);
  void become_full(const std::string& trouble);
  void fail(const std::string& trouble);
  void become_busy(Lane& lane);
  [[nodiscard]] std::string describe(const Transfer& transfer, int error) const;

  void work();
  [[nodiscard]] int run(const Chunk& chunk, Bounce& bounce);  // without the lock

  Options options_;
  const FileCalls calls_;
  const bool throttled_;
  std::atomic<bool> lost_{false};  // made before a fork, and this is the child
  std::atomic<std::size_t> room_{0};

  mutable std::mutex mutex_;
  std::condition_variable work_;  // for the threads
  std::condition_variable done_;  // a chunk
  Slab slab_;
  std::size_t probing_ = 0;  // bytes that a probe holds for a moment, and nobody is told of
  std::size_t peak_held_ = 0;
  std::unique_ptr<ScratchFile> file_;
  std::vector<std::thread> threads_;
  std::string trouble_;
  bool broken_ = false;    // nothing is written any more
  bool stopping_ = false;
  bool paused_ = false;    // by a fork that is to come
  int returns_in_a_row_ = 0;  // while there was something to write
  Disk* disk_ = nullptr;   // guarded by Forks
};

// What a fork has to know.
struct Disk::State::Forks {
  std::mutex mutex;
  std::set<State*> states;

  static Forks& get();
  static void before();
  static void after_in_parent();
  static void after_in_child();
  static const int watching;
};

}  // namespace rematfn
