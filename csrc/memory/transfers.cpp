// SPDX-License-Identifier: Apache-2.0
#include "memory/transfers.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "base/background.h"
#include "base/condition_variable.h"
#include "base/interpreter.h"

namespace rematfn {
namespace {

constexpr double kThrottledChunk = 0.01;  // seconds

std::size_t chunk_for(const Transfers::Options& options) {
  const double slow = std::min(options.bandwidth * kThrottledChunk, 1e15);  // it may be infinite
  const auto most = std::max(static_cast<std::size_t>(slow), TierAccount::kTelling);
  return std::min(TierAccount::rounded(options.chunk), TierAccount::rounded(most));
}

}  // namespace

Transfers::Transfers(const Options& options, TierAccount& account)
    : bandwidth_(options.bandwidth),
      chunk_(chunk_for(options)),
      most_threads_(std::max(options.threads, 1)),
      out_(account.out),
      in_(account.in) {}

Transfers::~Transfers() {
  {
    const std::lock_guard guard(mutex);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Transfers::start() {
  try {
    for (int i = 0; i < most_threads_; ++i) threads_.push_back(start_in_background([this] { run(); }));
  } catch (const std::exception& error) {  // fewer will do
    if (threads_.empty()) throw std::runtime_error(std::string("no thread can be started: ") + error.what());
  }
}

void Transfers::begin(Transfer& transfer, bool out, std::unique_lock<std::mutex> lock) {
  Lane& lane = out ? out_ : in_;
  lane.queue.push_back(&transfer);
  transfer.out_ = out;
  transfer.begun_ = 0;
  transfer.awaited_ = false;
  transfer.error_ = 0;
  transfer.done_.store(false, std::memory_order_relaxed);
  lane.traffic.queued += transfer.nbytes_;
  lock.unlock();
  work_.notify_one();
}

// See Note [Returns go before writes], and Note [Who waits does not hold the interpreter]
double Transfers::wait(Transfer& transfer) {
  if (transfer.is_done()) return 0;
  const Clock::time_point before = Clock::now();
  const WithoutInterpreter scope;
  std::unique_lock lock(mutex);
  transfer.awaited_ = true;
  std::deque<Transfer*>& queue = lane_of(transfer).queue;
  if (std::erase(queue, &transfer) > 0) queue.push_front(&transfer);
  while (!transfer.is_done()) wait_on(done_, lock);
  return std::chrono::duration<double>(Clock::now() - before).count();
}

double Transfers::cancel(Transfer& transfer) {
  const Clock::time_point before = Clock::now();
  std::unique_lock lock(mutex);
  if (transfer.is_done()) return 0;
  dequeue(transfer);
  while (transfer.under_way_ > 0) wait_on(done_, lock);
  return std::chrono::duration<double>(Clock::now() - before).count();
}

void Transfers::pause() {
  std::unique_lock lock(mutex);
  paused_ = true;
  while (in_.under_way + out_.under_way > 0) wait_on(done_, lock);
  lock.release();
}

void Transfers::resume() {
  paused_ = false;
  mutex.unlock();
  work_.notify_all();
}

// ---- queues: the lock is held -----------------------------------------------------------------

void Transfers::dequeue(Transfer& transfer) {
  Lane& lane = lane_of(transfer);
  if (std::erase(lane.queue, &transfer) > 0) lane.traffic.queued -= transfer.nbytes_ - transfer.begun_;
}

// See Note [Returns go before writes]
Transfers::Lane* Transfers::choose() {
  if (paused_) return nullptr;
  const Clock::time_point now = Clock::now();  // who is to wait until `due` looks here then
  const auto is_ready = [&](const Lane& lane) { return !lane.queue.empty() && lane.due <= now; };
  if (!is_ready(in_)) return is_ready(out_) ? &out_ : nullptr;
  if (!is_ready(out_)) return &in_;
  const bool awaited = in_.queue.front()->awaited_;
  if (awaited != out_.queue.front()->awaited_) return awaited ? &in_ : &out_;
  return in_.under_way <= out_.under_way ? &in_ : &out_;
}

// ---- the threads ------------------------------------------------------------------------------

// A thread, which wakes the next if there is more to do: where all cores are busy, one that wakes
// takes an operator's place. Whoever wakes it does not hold the lock, which it would wait for at once.
void Transfers::run() {
  Bounce bounce;
  std::ignore = bounce.get();  // when it is needed memory may be short
  std::unique_lock lock(mutex);
  while (!stopping_) {
    if (Lane* lane = choose()) {
      run_chunk(*lane, lock, bounce);
    } else {
      wait_on(work_, lock);
    }
  }
}

void Transfers::run_chunk(Lane& lane, std::unique_lock<std::mutex>& lock, Bounce& bounce) {
  Transfer& transfer = *lane.queue.front();
  const std::size_t begin = transfer.begun_;
  const std::size_t nbytes = std::min(chunk_, transfer.nbytes_ - begin);
  const Clock::time_point now = Clock::now();
  const std::chrono::duration<double> least(static_cast<double>(nbytes) / bandwidth_);
  lane.due = std::max(lane.due, now) + std::chrono::duration_cast<Clock::duration>(least);
  const Clock::time_point due = lane.due;
  if (lane.under_way++ == 0) lane.since = now;
  ++transfer.under_way_;
  transfer.begun_ += nbytes;
  if (transfer.begun_ == transfer.nbytes_) lane.queue.pop_front();
  const bool is_more = !in_.queue.empty() || !out_.queue.empty();
  lock.unlock();
  if (is_more) work_.notify_one();
  const int error = transfer.move(transfer.out_, begin, nbytes, bounce);
  std::this_thread::sleep_until(due);
  lock.lock();
  // Time in which several chunks were under way counts once.
  const Clock::time_point over = Clock::now();
  const std::chrono::duration<double> took = over - std::exchange(lane.since, over);
  lane.traffic.note(nbytes, took.count());
  lane.traffic.bytes += nbytes;
  lane.traffic.queued -= nbytes;
  --lane.under_way;
  --transfer.under_way_;
  if (error != 0) {
    dequeue(transfer);
    if (transfer.error_ == 0) transfer.error_ = error;
  }
  if (transfer.under_way_ == 0 && (transfer.error_ != 0 || transfer.begun_ == transfer.nbytes_)) {
    transfer.end(transfer.out_, transfer.error_);
    transfer.done_.store(true, std::memory_order_release);  // from now on it is its user's
  }
  done_.notify_all();
}

}  // namespace rematfn
