// SPDX-License-Identifier: Apache-2.0
//
// transfers.h: bytes go out and come in beside what else goes on, on a few threads.
//
// Note [Returns go before writes]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A return is waited for, by an operator that reads the value; a write hardly ever is. So what comes
// goes first. Where nobody waits yet, threads share themselves between the directions, each of which has
// a bandwidth of its own: room that is made too late is waited for as well. What somebody waits for
// overtakes all that has been asked for before. Values are transferred in chunks, so that two threads share a large one, and one that is
// called back need not be written to its end.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

#include "memory/scratch_file.h"
#include "memory/tier_account.h"

namespace rematfn {

class Transfers {
 public:
  struct Options {
    int threads = 2;
    std::size_t chunk = std::size_t{4} << 20;
    // In bytes per second, for each direction: `Disk(bandwidth=)` throttles it.
    double bandwidth = std::numeric_limits<double>::infinity();
  };

  // Bytes that go one way or the other, one way at a time.
  class Transfer {
   public:
    explicit Transfer(std::size_t nbytes) : nbytes_(nbytes) {}
    virtual ~Transfer() = default;
    Transfer(const Transfer&) = delete;
    Transfer& operator=(const Transfer&) = delete;

    // An atomic load.
    [[nodiscard]] bool is_done() const { return done_.load(std::memory_order_acquire); }

   protected:
    // A part, on one of the threads. Returns 0 or an error.
    [[nodiscard]] virtual int move(bool out, std::size_t begin, std::size_t nbytes, Bounce& bounce) = 0;
    // Under the lock: it is over; with the first error, or 0.
    virtual void end(bool out, int error) = 0;

   private:
    friend class Transfers;

    const std::size_t nbytes_;
    std::atomic<bool> done_{true};  // what stands below is the lock's
    bool out_ = false;
    std::size_t begun_ = 0;    // its chunks up to here
    unsigned under_way_ = 0;   // of these
    bool awaited_ = false;
    int error_ = 0;
  };

  Transfers(const Options& options, TierAccount& account);
  ~Transfers();
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  // Before the first transfer. Throws if no thread is to be had.
  void start();
  // `lock` holds the mutex, which is free when this returns.
  void begin(Transfer& transfer, bool out, std::unique_lock<std::mutex> lock);
  // Until it is over. Releases the interpreter's lock. Returns the seconds that it took.
  double wait(Transfer& transfer);
  // What has not begun does not begin any more; waits for the chunks that have. Returns the seconds.
  double cancel(Transfer& transfer);
  // Until resume(): nothing is under way, and the mutex is held.
  void pause();
  void resume();

  [[nodiscard]] std::size_t chunk() const { return chunk_; }

  std::mutex mutex;  // of the account, too

 private:
  using Clock = std::chrono::steady_clock;
  struct Lane {  // of one direction
    explicit Lane(TierAccount::Traffic& counted) : traffic(counted) {}

    TierAccount::Traffic& traffic;
    std::deque<Transfer*> queue{};  // those with chunks that have not begun
    unsigned under_way = 0;         // chunks
    Clock::time_point since{};      // the time of what is under way is counted up to here
    Clock::time_point due{};        // what has begun takes until then at least
  };

  [[nodiscard]] Lane& lane_of(const Transfer& transfer) { return transfer.out_ ? out_ : in_; }
  void dequeue(Transfer& transfer);
  [[nodiscard]] Lane* choose();
  void run();
  void run_chunk(Lane& lane, std::unique_lock<std::mutex>& lock, Bounce& bounce);

  const double bandwidth_;
  const std::size_t chunk_;
  const int most_threads_;
  Lane out_, in_;
  std::condition_variable work_;  // for the threads
  std::condition_variable done_;  // a chunk
  bool stopping_ = false;
  bool paused_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace rematfn
