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

constexpr int kReturnsToWrite = 3;  // for each write, where there are both
constexpr std::chrono::milliseconds kLag(100);
constexpr double kThrottledChunk = 0.01;  // seconds

std::size_t chunk_for(const Transfers::Options& options) {
  const double slow = std::min(options.bandwidth * kThrottledChunk, 1e15);
  const auto most = std::max(static_cast<std::size_t>(slow), TierAccount::kTelling);
  return std::min(Slab::rounded(options.chunk), Slab::rounded(most));
}

}  // namespace

Transfers::Transfers(const Options& options, TierAccount& account)
    : bandwidth_(options.bandwidth),
      throttled_(options.bandwidth < std::numeric_limits<double>::infinity()),
      chunk_(throttled_ ? chunk_for(options) : Slab::rounded(options.chunk)),
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
  if (throttled_ && lane.queue.empty()) lane.due = std::max(lane.due, Clock::now());
  if (throttled_) become_busy(lane);
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
  const detail::WithoutInterpreter scope;
  std::unique_lock lock(mutex);
  transfer.awaited_ = true;
  std::deque<Transfer*>& queue = lane_of(transfer).queue;
  if (std::erase(queue, &transfer) > 0) queue.push_front(&transfer);
  done_.wait(lock, [&] { return transfer.is_done(); });
  return std::chrono::duration<double>(Clock::now() - before).count();
}

double Transfers::cancel(Transfer& transfer) {
  const Clock::time_point before = Clock::now();
  std::unique_lock lock(mutex);
  if (transfer.is_done()) return 0;
  dequeue(transfer);
  done_.wait(lock, [&] { return transfer.under_way_ == 0; });
  return std::chrono::duration<double>(Clock::now() - before).count();
}

void Transfers::pause() {
  std::unique_lock lock(mutex);
  paused_ = true;
  done_.wait(lock, [&] { return in_.under_way + out_.under_way == 0; });
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

// Before something is under way where perhaps nothing was.
void Transfers::become_busy(Lane& lane) const {
  if (lane.under_way == 0 && (!throttled_ || lane.queue.empty())) lane.since = Clock::now();
}

std::size_t Transfers::next_chunk(const Lane& lane) const {
  const Transfer& transfer = *lane.queue.front();
  return std::min(chunk_, transfer.nbytes_ - transfer.begun_);
}

// When the next chunk may begin; it is then taken for done.
Transfers::Clock::time_point Transfers::ready(const Lane& lane) const {
  if (lane.queue.empty() || paused_) return Clock::time_point::max();
  if (!throttled_) return Clock::time_point::min();
  const std::chrono::duration<double> takes(static_cast<double>(next_chunk(lane)) / bandwidth_);
  return lane.due + std::chrono::duration_cast<Clock::duration>(takes);
}

// See Note [Returns go before writes]
Transfers::Lane* Transfers::choose(Clock::time_point now) {
  if (ready(in_) > now) return ready(out_) <= now ? &out_ : nullptr;
  if (ready(out_) > now) return &in_;
  if (returns_in_a_row_ >= kReturnsToWrite) return &out_;
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
    const Clock::time_point now = Clock::now();
    if (Lane* lane = choose(now)) {
      run_chunk(*lane, now, lock, bounce);
      continue;
    }
    const Clock::time_point next = std::min(ready(in_), ready(out_));
    if (next == Clock::time_point::max()) {
      work_.wait(lock);
    } else {
      work_.wait_until(lock, next);
    }
  }
}

void Transfers::run_chunk(Lane& lane, Clock::time_point now, std::unique_lock<std::mutex>& lock,
                          Bounce& bounce) {
  returns_in_a_row_ = &lane == &in_ && !out_.queue.empty() ? returns_in_a_row_ + 1 : 0;
  if (throttled_) lane.due = std::max(ready(lane), now - kLag);
  Transfer& transfer = *lane.queue.front();
  const std::size_t begin = transfer.begun_;
  const std::size_t nbytes = next_chunk(lane);
  become_busy(lane);
  ++lane.under_way;
  ++transfer.under_way_;
  transfer.begun_ += nbytes;
  if (transfer.begun_ == transfer.nbytes_) lane.queue.pop_front();
  const bool is_more = !in_.queue.empty() || !out_.queue.empty();
  lock.unlock();
  if (is_more) work_.notify_one();
  const int error = transfer.move(transfer.out_, begin, nbytes, bounce);
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
