// SPDX-License-Identifier: Apache-2.0
#include "memory/disk_state.h"

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <tuple>
#include <utility>

#include "base/background.h"
#include "memory/checksum.h"

namespace rematfn {
namespace {

constexpr int kReturnsToWrite = 3;  // for each write, where there are both
constexpr int kCorrupted = -2;      // beside an errno and ScratchFile::kTruncated
constexpr std::size_t kLeastChunk = std::size_t{64} << 10;
constexpr std::chrono::milliseconds kLag(100);
constexpr double kThrottledChunk = 0.01;   // seconds
constexpr double kRemembered = 256 << 20;  // bytes

double seconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

// ---- from begin to end ------------------------------------------------------------------------

std::shared_ptr<Disk::State> Disk::State::make(Options options, const FileCalls& calls, Disk* disk) {
  // What has been lost by a fork stays: its lock is held, and threads are missing that waited.
  std::shared_ptr<State> made(new State(std::move(options), calls), [](State* state) {
    if (!state->is_lost()) delete state;
  });
  made->disk_ = disk;
  Forks& forks = Forks::get();
  const std::lock_guard guard(forks.mutex);
  forks.states.insert(made.get());
  return made;
}

Disk::State::State(Options options, const FileCalls& calls)
    : options_(std::move(options)),
      calls_(calls),
      throttled_(options_.bandwidth < std::numeric_limits<double>::infinity()),
      slab_(options_.budget) {
  options_.chunk = Slab::rounded(options_.chunk);
  options_.threads = std::max(options_.threads, 1);
  if (throttled_) {
    const auto slow = static_cast<std::size_t>(std::min(options_.bandwidth * kThrottledChunk, 1e15));
    options_.chunk = std::min(options_.chunk, Slab::rounded(std::max(slow, kLeastChunk)));
  }
  room_ = slab_.largest();
}

Disk::State::~State() {
  {
    Forks& forks = Forks::get();
    const std::lock_guard guard(forks.mutex);
    forks.states.erase(this);
  }
  {
    const std::lock_guard guard(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Disk::State::leave() {
  const std::lock_guard guard(Forks::get().mutex);
  disk_ = nullptr;
}

bool Disk::State::is_open() {
  if (broken_ || file_) return !broken_;
  try {
    file_ = std::make_unique<ScratchFile>(options_.folder, options_.direct, calls_);
  } catch (const DiskError& error) {
    fail(error.what());
    return false;
  }
  try {
    threads_.reserve(static_cast<std::size_t>(options_.threads));
    for (int i = 0; i < options_.threads; ++i) {
      threads_.push_back(start_in_background([this] { work(); }));
    }
  } catch (const std::exception& error) {  // fewer will do
    if (!threads_.empty()) return true;
    fail(said_of(options_.folder) + "no thread can be started: " + error.what());
  }
  return !broken_;
}

// ---- what is asked of it ----------------------------------------------------------------------

bool Disk::State::write(Transfer& transfer, const char* bytes) {
  transfer.written = transfer.nbytes == 0;
  if (transfer.nbytes == 0) return true;
  std::unique_lock lock(mutex_);
  if (broken_ || transfer.nbytes > room_ || !is_open()) return false;
  if (options_.verify) {
    transfer.checksums.resize((transfer.nbytes + options_.chunk - 1) / options_.chunk);
  }
  const std::size_t before = slab_.held();
  transfer.offset = slab_.allocate(transfer.nbytes);
  room_ = slab_.largest();
  if (!transfer.offset) return false;
  if (!transfer.counted) probing_ += slab_.held() - before;
  peak_held_ = std::max(peak_held_, slab_.held() - probing_);
  try {
    enqueue(transfer, /*goes_out=*/true, const_cast<char*>(bytes));
  } catch (...) {
    free_slot(transfer);
    throw;
  }
  lock.unlock();
  wake_one();
  return true;
}

void Disk::State::read(Transfer& transfer, char* to) {
  transfer.error.clear();
  if (transfer.nbytes == 0) return;
  {
    const std::lock_guard guard(mutex_);
    enqueue(transfer, /*goes_out=*/false, to);
  }
  wake_one();
}

// See Note [Returns go before writes]
void Disk::State::wait(Transfer& transfer) {
  std::unique_lock lock(mutex_);
  transfer.awaited = true;
  if (transfer.queued) {
    auto& queue = lane_of(transfer).queue;
    queue.splice(queue.begin(), queue, *transfer.queued);
  }
  done_.wait(lock, [&] { return transfer.done.load(std::memory_order_relaxed); });
}

void Disk::State::discard(Transfer& transfer) {
  if (is_lost() || transfer.nbytes == 0) return;
  std::unique_lock lock(mutex_);
  dequeue(transfer);
  done_.wait(lock, [&] { return transfer.under_way == 0; });
  free_slot(transfer);
}

void Disk::State::throw_if_lost() const {
  if (!is_lost()) return;
  throw DiskError(said_of(options_.folder) +
                  "what was moved there before a fork cannot be had in the child. Call the function "
                  "anew there.");
}

std::string Disk::State::trouble() const {
  const std::lock_guard guard(mutex_);
  return trouble_;
}

Disk::Statistics Disk::State::statistics() const {
  const std::lock_guard guard(mutex_);
  Statistics found;
  for (const auto& [to, lane] : {std::pair(&found.out, &out), std::pair(&found.in, &in)}) {
    *to = lane->traffic;
    to->bandwidth = lane->bandwidth;
    to->queued = lane->queued;
  }
  found.held = slab_.held() - probing_;
  found.peak_held = peak_held_;
  found.capacity = broken_ ? 0 : slab_.capacity();
  found.direct = file_ ? file_->is_direct() : options_.direct;
  return found;
}

// ---- queues -----------------------------------------------------------------------------------

// Before something is under way where perhaps nothing was.
void Disk::State::become_busy(Lane& lane) {
  if (lane.under_way == 0 && (!throttled_ || lane.queue.empty())) lane.since = Clock::now();
}

void Disk::State::enqueue(Transfer& transfer, bool goes_out, char* memory) {
  Lane& lane = goes_out ? out : in;
  if (throttled_ && lane.queue.empty()) lane.due = std::max(lane.due, Clock::now());
  if (throttled_) become_busy(lane);
  lane.queue.push_back(&transfer);
  transfer.queued = std::prev(lane.queue.end());
  transfer.goes_out = goes_out;
  transfer.memory = memory;
  transfer.begun = 0;
  transfer.awaited = false;
  transfer.done.store(false, std::memory_order_relaxed);
  lane.queued += transfer.nbytes;
}

// What has not begun does not begin any more.
void Disk::State::dequeue(Transfer& transfer) {
  if (!transfer.queued) return;
  Lane& lane = lane_of(transfer);
  lane.queue.erase(*transfer.queued);
  transfer.queued.reset();
  lane.queued -= transfer.nbytes - transfer.begun;
}

std::size_t Disk::State::next_chunk(const Lane& lane) const {
  const Transfer& transfer = *lane.queue.front();
  return std::min(options_.chunk, transfer.nbytes - transfer.begun);
}

// When the next chunk may begin; it is then taken for done.
Disk::State::Clock::time_point Disk::State::ready(const Lane& lane) const {
  if (!throttled_) return Clock::time_point::min();
  const auto nbytes = static_cast<double>(next_chunk(lane));
  const std::chrono::duration<double> takes(nbytes / options_.bandwidth);
  return lane.due + std::chrono::duration_cast<Clock::duration>(takes);
}

// See Note [Returns go before writes]
Disk::State::Lane* Disk::State::choose(Clock::time_point now) {
  const auto can = [&](const Lane& lane) { return !lane.queue.empty() && ready(lane) <= now; };
  if (paused_) return nullptr;
  if (!can(in)) return can(out) ? &out : nullptr;
  if (!can(out)) return &in;
  if (returns_in_a_row_ >= kReturnsToWrite) return &out;
  const bool awaited = in.queue.front()->awaited;
  if (awaited != out.queue.front()->awaited) return awaited ? &in : &out;
  return in.under_way <= out.under_way ? &in : &out;
}

Disk::State::Chunk Disk::State::begin(Lane& lane, Clock::time_point now) {
  returns_in_a_row_ = &lane == &in && !out.queue.empty() ? returns_in_a_row_ + 1 : 0;
  if (throttled_) lane.due = std::max(ready(lane), now - kLag);
  Transfer& transfer = *lane.queue.front();
  const Chunk chunk{&transfer, transfer.begun, next_chunk(lane)};
  become_busy(lane);
  ++lane.under_way;
  ++transfer.under_way;
  transfer.begun += chunk.nbytes;
  if (transfer.begun == transfer.nbytes) {
    lane.queue.pop_front();
    transfer.queued.reset();
  }
  return chunk;
}

void Disk::State::finish(const Chunk& chunk, int error) {
  Transfer& transfer = *chunk.transfer;
  Lane& lane = lane_of(transfer);
  measure(lane, chunk);
  --lane.under_way;
  --transfer.under_way;
  lane.queued -= chunk.nbytes;
  if (error != 0) {
    dequeue(transfer);
    if (transfer.error.empty()) transfer.error = describe(transfer, error);
    const bool is_full = error == ENOSPC || error == EDQUOT || error == EFBIG;
    if (is_full && transfer.goes_out) {
      transfer.full = true;
    } else if (error != ENOMEM) {  // which passes
      fail(transfer.error);
    }
  }
  if (transfer.under_way == 0 && !transfer.queued) conclude(transfer);
  done_.notify_all();
}

// Time in which several chunks were under way counts once. What is smaller tells of delays, not of
// bandwidth.
void Disk::State::measure(Lane& lane, const Chunk& chunk) {
  const Clock::time_point now = Clock::now();
  const double took = seconds(now - std::exchange(lane.since, now));
  if (chunk.transfer->counted) {
    lane.traffic.seconds += took;
    lane.traffic.bytes += chunk.nbytes;
  }
  if (chunk.nbytes < kLeastChunk) return;
  const auto nbytes = static_cast<double>(chunk.nbytes);
  const double keep = 1 - std::min(nbytes / kRemembered, 1.0);
  lane.recent_bytes = lane.recent_bytes * keep + nbytes;
  lane.recent_seconds = lane.recent_seconds * keep + took;
  lane.bandwidth = lane.recent_bytes / std::max(lane.recent_seconds, 1e-9);
}

// Nothing of it is under way or queued.
void Disk::State::conclude(Transfer& transfer) {
  if (transfer.error.empty()) {
    transfer.written = true;
    if (transfer.counted) ++lane_of(transfer).traffic.transfers;
  } else if (transfer.goes_out) {
    free_slot(transfer);
    if (transfer.full && transfer.counted) become_full(transfer.error);
  }
  transfer.done.store(true, std::memory_order_release);
}

void Disk::State::free_slot(Transfer& transfer) {
  if (!transfer.offset) return;
  const std::size_t before = slab_.held();
  slab_.free(*transfer.offset, transfer.nbytes);
  transfer.offset.reset();
  if (!transfer.counted) probing_ -= before - slab_.held();
  room_ = broken_ ? 0 : slab_.largest();
}

// What the others hold is all that there is.
void Disk::State::become_full(const std::string& trouble) {
  slab_.set_capacity(std::min(slab_.capacity(), slab_.held()));
  room_ = broken_ ? 0 : slab_.largest();
  if (trouble_.empty()) trouble_ = trouble;
}

void Disk::State::fail(const std::string& trouble) {
  if (!broken_) trouble_ = trouble;
  broken_ = true;
  room_ = 0;
}

std::string Disk::State::describe(const Transfer& transfer, int error) const {
  const std::string text = said_of(options_.folder) + "could not " +
                           (transfer.goes_out ? "write " : "read back ") +
                           std::to_string(transfer.nbytes) + " bytes: ";
  switch (error) {
    case kCorrupted:
      return text + "they are not what was written. Name a directory on another disk.";
    case ScratchFile::kTruncated:
      return text + "the file has become shorter. Name a directory where nobody cuts it.";
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return text + describe_error(error) +
             ". Make room there, give it a smaller budget, or name another directory.";
    case ENOMEM:
      return text + describe_error(error) + ". Leave the process more memory, or more addresses.";
    default:
      return text + describe_error(error) + ". Name a directory on another disk.";
  }
}

// ---- the threads ------------------------------------------------------------------------------

void Disk::State::work() {
  Bounce bounce;
  std::ignore = bounce.get();  // when it is needed memory may be short
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const Clock::time_point now = Clock::now();
    if (Lane* lane = choose(now)) {
      const Chunk chunk = begin(*lane, now);
      const bool is_more = !in.queue.empty() || !out.queue.empty();
      lock.unlock();
      if (is_more) wake_one();
      const int error = run(chunk, bounce);
      lock.lock();
      finish(chunk, error);
      continue;
    }
    auto next = Clock::time_point::max();
    for (const Lane* lane : {&in, &out}) {
      if (!paused_ && !lane->queue.empty()) next = std::min(next, ready(*lane));
    }
    if (next == Clock::time_point::max()) {
      work_.wait(lock);
    } else {
      work_.wait_until(lock, next);
    }
  }
}

int Disk::State::run(const Chunk& chunk, Bounce& bounce) {
  Transfer& transfer = *chunk.transfer;
  char* const memory = transfer.memory + chunk.begin;
  const std::size_t offset = *transfer.offset + chunk.begin;
  const auto sum = [&] { return checksum(memory, chunk.nbytes); };
  const auto kept = [&]() -> std::uint64_t& {
    return transfer.checksums[chunk.begin / options_.chunk];
  };
  if (transfer.goes_out) {
    if (options_.verify) kept() = sum();
    return file_->write(memory, chunk.nbytes, offset, bounce);
  }
  const int error = file_->read(memory, chunk.nbytes, offset, bounce);
  return error == 0 && options_.verify && sum() != kept() ? kCorrupted : error;
}

}  // namespace rematfn
