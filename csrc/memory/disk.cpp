// SPDX-License-Identifier: Apache-2.0
#include "memory/disk.h"

#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <utility>

#include "base/background.h"
#include "base/condition_variable.h"
#include "base/interpreter.h"
#include "memory/checksum.h"
#include "memory/slab.h"

namespace rematfn {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kReturnsToWrite = 3;  // for each write, where there are both
constexpr int kCorrupted = -2;      // beside an errno and ScratchFile::kTruncated
constexpr std::size_t kLeastChunk = std::size_t{64} << 10;
constexpr std::chrono::milliseconds kLag(100);
constexpr double kThrottledChunk = 0.01;   // seconds
constexpr double kRemembered = 256 << 20;  // bytes
constexpr std::size_t kFirstProbe = std::size_t{1} << 20;
constexpr std::size_t kProbe = std::size_t{16} << 20;
constexpr std::chrono::milliseconds kSoon(50);

}  // namespace

// What its copies and its threads share: the queues, and who transfers what next.
struct Disk::State {
  // One direction.
  struct Lane {
    std::atomic<std::size_t> queued{0};  // bytes
    std::atomic<double> bandwidth{0};

    // The lock's:
    std::list<Copy*> queue;      // those with chunks that have not begun
    unsigned under_way = 0;      // chunks
    Traffic traffic;
    Clock::time_point since;  // the time of what is under way is counted up to here
    Clock::time_point due;    // throttled: what has begun takes until then
    double recent_bytes = 0;
    double recent_seconds = 0;
  };
  struct Chunk {
    Copy* copy = nullptr;
    std::size_t begin = 0;
    std::size_t nbytes = 0;
  };
  // What a fork has to know.
  struct Forks {
    std::mutex mutex;
    std::set<State*> states;
  };

  State(Options given, const FileCalls& file_calls)
      : options(std::move(given)),
        calls(file_calls),
        throttled(options.bandwidth < std::numeric_limits<double>::infinity()),
        slab(options.budget) {
    options.chunk = Slab::rounded(options.chunk);
    options.threads = std::max(options.threads, 1);
    if (throttled) {
      const auto slow = static_cast<std::size_t>(std::min(options.bandwidth * kThrottledChunk, 1e15));
      options.chunk = std::min(options.chunk, Slab::rounded(std::max(slow, kLeastChunk)));
    }
  }

  ~State() {
    {
      const std::lock_guard guard(forks().mutex);
      forks().states.erase(this);
    }
    {
      const std::lock_guard guard(mutex);
      stopping = true;
    }
    work.notify_all();
    for (std::thread& thread : threads) thread.join();
  }

  static std::shared_ptr<State> make(Options options, const FileCalls& calls, Disk* disk) {
    // What has been lost by a fork stays: its lock is held, and threads are missing that waited.
    std::shared_ptr<State> made(new State(std::move(options), calls), [](State* state) {
      if (!state->lost) delete state;
    });
    made->disk = disk;
    const std::lock_guard guard(forks().mutex);
    forks().states.insert(made.get());
    return made;
  }

  static Forks& forks() {
    static auto* const forks = new Forks;  // outlives what is destroyed at exit
    return *forks;
  }

  static void before_fork() {
    forks().mutex.lock();
    for (State* state : forks().states) {
      std::unique_lock lock(state->mutex);
      state->paused = true;
      state->done.wait(lock, [&] { return state->in.under_way + state->out.under_way == 0; });
      lock.release();  // until the fork is over
    }
  }

  static void after_fork_in_parent() {
    for (State* state : forks().states) {
      state->paused = false;
      state->mutex.unlock();
      state->work.notify_all();
    }
    forks().mutex.unlock();
  }

  // What the parent's threads may have waited for is not touched any more.
  static void after_fork_in_child() {
    const std::set<State*> before = std::exchange(forks().states, {});
    for (State* state : before) {
      state->lost = true;
      state->file.reset();  // it is the parent's
    }
    forks().mutex.unlock();
    for (State* state : before) {
      if (state->disk == nullptr) continue;
      state->disk->state_ = make(state->options, state->calls, state->disk);
    }
  }

  void throw_if_lost() const {
    if (!lost) return;
    throw DiskError(said_of(options.folder) +
                    "what was moved there before a fork cannot be had in the child. Call the function "
                    "anew there.");
  }

  static const int watching_forks;

  // ---- queues: the lock is held ----

  bool is_open() {
    if (broken || file) return !broken;
    try {
      file = std::make_unique<ScratchFile>(options.folder, options.direct, calls);
    } catch (const DiskError& error) {
      fail(error.what());
      return false;
    }
    try {
      threads.reserve(static_cast<std::size_t>(options.threads));
      for (int i = 0; i < options.threads; ++i) {
        threads.push_back(start_in_background([this] { run(); }));
      }
    } catch (const std::exception& error) {  // fewer will do
      if (!threads.empty()) return true;
      fail(said_of(options.folder) + "no thread can be started: " + error.what());
    }
    return !broken;
  }

  [[nodiscard]] Lane& lane_of(const Copy& copy) { return copy.goes_out_ ? out : in; }

  // Before something is under way where perhaps nothing was.
  void become_busy(Lane& lane) {
    if (lane.under_way == 0 && (!throttled || lane.queue.empty())) lane.since = Clock::now();
  }

  void enqueue(Copy& copy, bool goes_out, char* memory) {
    Lane& lane = goes_out ? out : in;
    if (throttled && lane.queue.empty()) lane.due = std::max(lane.due, Clock::now());
    if (throttled) become_busy(lane);
    lane.queue.push_back(&copy);
    copy.queued_ = std::prev(lane.queue.end());
    copy.goes_out_ = goes_out;
    copy.memory_ = memory;
    copy.begun_ = 0;
    copy.awaited_ = false;
    copy.done_.store(false, std::memory_order_relaxed);
    lane.queued += copy.nbytes_;
  }

  // What has not begun does not begin any more.
  void dequeue(Copy& copy) {
    if (!copy.queued_) return;
    Lane& lane = lane_of(copy);
    lane.queue.erase(*copy.queued_);
    copy.queued_.reset();
    lane.queued -= copy.nbytes_ - copy.begun_;
  }

  std::size_t next_chunk(const Lane& lane) const {
    const Copy& copy = *lane.queue.front();
    return std::min(options.chunk, copy.nbytes_ - copy.begun_);
  }

  // When the next chunk may begin; it is then taken for done.
  Clock::time_point ready(const Lane& lane) const {
    if (!throttled) return Clock::time_point::min();
    const auto nbytes = static_cast<double>(next_chunk(lane));
    const std::chrono::duration<double> takes(nbytes / options.bandwidth);
    return lane.due + std::chrono::duration_cast<Clock::duration>(takes);
  }

  // See Note [Returns go before writes]
  Lane* choose(Clock::time_point now) {
    const auto can = [&](const Lane& lane) { return !lane.queue.empty() && ready(lane) <= now; };
    if (paused) return nullptr;
    if (!can(in)) return can(out) ? &out : nullptr;
    if (!can(out)) return &in;
    if (returns_in_a_row >= kReturnsToWrite) return &out;
    const bool awaited = in.queue.front()->awaited_;
    if (awaited != out.queue.front()->awaited_) return awaited ? &in : &out;
    return in.under_way <= out.under_way ? &in : &out;
  }

  Chunk begin(Lane& lane, Clock::time_point now) {
    returns_in_a_row = &lane == &in && !out.queue.empty() ? returns_in_a_row + 1 : 0;
    if (throttled) lane.due = std::max(ready(lane), now - kLag);
    Copy& copy = *lane.queue.front();
    const Chunk chunk{&copy, copy.begun_, next_chunk(lane)};
    become_busy(lane);
    ++lane.under_way;
    ++copy.under_way_;
    copy.begun_ += chunk.nbytes;
    if (copy.begun_ == copy.nbytes_) {
      lane.queue.pop_front();
      copy.queued_.reset();
    }
    return chunk;
  }

  void finish(const Chunk& chunk, int error) {
    Copy& copy = *chunk.copy;
    Lane& lane = lane_of(copy);
    measure(lane, chunk);
    --lane.under_way;
    --copy.under_way_;
    lane.queued -= chunk.nbytes;
    if (error != 0) {
      dequeue(copy);
      if (copy.error_.empty()) copy.error_ = describe(copy, error);
      const bool is_full = error == ENOSPC || error == EDQUOT || error == EFBIG;
      if (is_full && copy.goes_out_) {
        copy.full_ = true;
      } else if (error != ENOMEM) {  // which passes
        fail(copy.error_);
      }
    }
    done.notify_all();
    if (copy.under_way_ > 0 || copy.queued_) return;
    if (copy.error_.empty()) {
      copy.written_ = true;
      if (copy.counted_) ++lane.traffic.transfers;
    } else if (copy.goes_out_) {
      free_slot(copy);
      if (copy.full_ && copy.counted_) {  // what the others hold is all that there is
        slab.set_capacity(std::min(slab.capacity(), slab.held()));
        if (trouble.empty()) trouble = copy.error_;
      }
    }
    copy.done_.store(true, std::memory_order_release);  // from now on it is its user's
  }

  // Time in which several chunks were under way counts once. What is smaller tells of delays, not of
  // bandwidth.
  void measure(Lane& lane, const Chunk& chunk) {
    const Clock::time_point now = Clock::now();
    const std::chrono::duration<double> took = now - std::exchange(lane.since, now);
    if (chunk.copy->counted_) lane.traffic.bytes += chunk.nbytes;
    if (chunk.nbytes < kLeastChunk) return;
    const auto nbytes = static_cast<double>(chunk.nbytes);
    const double keep = 1 - std::min(nbytes / kRemembered, 1.0);
    lane.recent_bytes = lane.recent_bytes * keep + nbytes;
    lane.recent_seconds = lane.recent_seconds * keep + took.count();
    lane.bandwidth = lane.recent_bytes / std::max(lane.recent_seconds, 1e-9);
  }

  void free_slot(Copy& copy) {
    if (!copy.offset_) return;
    const std::size_t before = slab.held();
    slab.free(*copy.offset_, copy.nbytes_);
    copy.offset_.reset();
    if (!copy.counted_) probing -= before - slab.held();
  }

  void fail(const std::string& why) {
    if (!broken) trouble = why;
    broken = true;
    slab.set_capacity(0);
  }

  std::string describe(const Copy& copy, int error) const {
    const std::string text = said_of(options.folder) + "could not " +
                             (copy.goes_out_ ? "write " : "read back ") + std::to_string(copy.nbytes_) +
                             " bytes: ";
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

  // ---- the threads ----

  // A thread, which wakes the next if there is more to do: where all cores are busy, one that wakes
  // takes an operator's place. Whoever wakes it does not hold the lock, which it would wait for at once.
  void run() {
    Bounce bounce;
    std::ignore = bounce.get();  // when it is needed memory may be short
    std::unique_lock lock(mutex);
    while (!stopping) {
      const Clock::time_point now = Clock::now();
      if (Lane* lane = choose(now)) {
        const Chunk chunk = begin(*lane, now);
        const bool is_more = !in.queue.empty() || !out.queue.empty();
        lock.unlock();
        if (is_more) work.notify_one();
        const int error = transfer(chunk, bounce);
        lock.lock();
        finish(chunk, error);
        continue;
      }
      auto next = Clock::time_point::max();
      for (const Lane* lane : {&in, &out}) {
        if (!paused && !lane->queue.empty()) next = std::min(next, ready(*lane));
      }
      if (next == Clock::time_point::max()) {
        work.wait(lock);
      } else {
        work.wait_until(lock, next);
      }
    }
  }

  int transfer(const Chunk& chunk, Bounce& bounce) {
    Copy& copy = *chunk.copy;
    char* const memory = copy.memory_ + chunk.begin;
    const std::size_t offset = *copy.offset_ + chunk.begin;
    const auto sum = [&] { return checksum(memory, chunk.nbytes); };
    const auto kept = [&]() -> std::uint64_t& { return copy.checksums_[chunk.begin / options.chunk]; };
    if (copy.goes_out_) {
      if (options.verify) kept() = sum();
      return file->write(memory, chunk.nbytes, offset, bounce);
    }
    const int error = file->read(memory, chunk.nbytes, offset, bounce);
    return error == 0 && options.verify && sum() != kept() ? kCorrupted : error;
  }

  Options options;
  const FileCalls calls;
  const bool throttled;
  Disk* disk = nullptr;           // null once it is gone; guarded by Forks
  std::atomic<bool> lost{false};  // made before a fork, and this is the child
  Lane out;
  Lane in;

  std::mutex mutex;  // of what follows
  std::condition_variable work;  // for the threads
  std::condition_variable done;  // a chunk
  Slab slab;
  std::size_t probing = 0;  // bytes that a probe holds for a moment, and nobody is told of
  std::size_t peak_held = 0;
  std::unique_ptr<ScratchFile> file;
  std::vector<std::thread> threads;
  std::string trouble;
  bool broken = false;  // nothing is written any more
  bool stopping = false;
  bool paused = false;  // by a fork that is to come
  int returns_in_a_row = 0;  // while there was something to write
};

// When the library is loaded, and so before all others. See Note [No transfer runs across a fork]
const int Disk::State::watching_forks =
    pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child);

Disk::Disk(Options options, const FileCalls& calls) {
  check_scratch_folder(options.folder);
  state_ = State::make(std::move(options), calls, this);
}

Disk::~Disk() {
  const std::lock_guard guard(State::forks().mutex);
  state_->disk = nullptr;
}

std::unique_ptr<Disk::Copy> Disk::write(const void* bytes, std::size_t nbytes, bool counted) {
  State& state = *state_;
  std::unique_ptr<Copy> copy(new Copy(state_, nbytes, counted));
  if (nbytes == 0) return copy;
  {
    const std::lock_guard guard(state.mutex);
    if (!has_room(nbytes) || !state.is_open()) return nullptr;
    if (state.options.verify) {
      copy->checksums_.resize((nbytes + state.options.chunk - 1) / state.options.chunk);
    }
    const std::size_t before = state.slab.held();
    copy->offset_ = state.slab.allocate(nbytes);
    if (!copy->offset_) return nullptr;
    if (!counted) state.probing += state.slab.held() - before;
    state.peak_held = std::max(state.peak_held, state.slab.held() - state.probing);
    state.enqueue(*copy, /*goes_out=*/true, static_cast<char*>(const_cast<void*>(bytes)));
  }
  state.work.notify_one();
  return copy;
}

bool Disk::has_room(std::size_t nbytes) const { return nbytes <= state_->slab.largest(); }
double Disk::write_bandwidth() const { return state_->out.bandwidth; }
double Disk::read_bandwidth() const { return state_->in.bandwidth; }
std::size_t Disk::queued_to_read() const { return state_->in.queued; }

bool Disk::probe() {
  for (const std::size_t nbytes : {kFirstProbe, kProbe}) {
    const auto begin = Clock::now();
    // Not zeros, which some disks are clever about; and of whole pages.
    std::vector<std::uint64_t> memory((nbytes + Slab::kAlignment) / sizeof(std::uint64_t));
    std::uint64_t word = 1;
    for (auto& each : memory) each = word = word * 6364136223846793005U + 1442695040888963407U;
    void* bytes = memory.data();
    std::size_t space = memory.size() * sizeof(word);
    std::align(Slab::kAlignment, nbytes, bytes, space);
    const std::unique_ptr<Copy> copy = write(bytes, nbytes, /*counted=*/false);
    if (!copy) break;
    try {
      copy->wait();
      copy->read(bytes);
      copy->wait();
    } catch (const DiskError&) {
      break;  // `trouble` tells
    }
    if (Clock::now() - begin > kSoon) break;  // slow enough to be known by that
  }
  return write_bandwidth() > 0 && read_bandwidth() > 0;
}

TierFigures Disk::figures() const {
  const State& state = *state_;
  const std::lock_guard guard(state_->mutex);
  TierFigures found;
  for (const auto& [to, lane] : {std::pair(&found.out, &state.out), std::pair(&found.in, &state.in)}) {
    *to = lane->traffic;
    to->bandwidth = lane->bandwidth;
    to->queued = lane->queued;
  }
  found.held = state.slab.held() - state.probing;
  found.peak_held = state.peak_held;
  found.capacity = state.slab.capacity();
  found.trouble = state.trouble;
  found.direct = state.file ? state.file->is_direct() : state.options.direct;
  return found;
}

Disk::Copy::Copy(std::shared_ptr<State> state, std::size_t nbytes, bool counted)
    : state_(std::move(state)), nbytes_(nbytes), counted_(counted), written_(nbytes == 0) {}

Disk::Copy::~Copy() {
  if (state_->lost || nbytes_ == 0) return;
  std::unique_lock lock(state_->mutex);
  state_->dequeue(*this);
  state_->done.wait(lock, [&] { return under_way_ == 0; });
  state_->free_slot(*this);
}

bool Disk::Copy::is_done() const { return done_.load(std::memory_order_acquire) || state_->lost; }

// See Note [Returns go before writes], and Note [Who waits does not hold the interpreter]
void Disk::Copy::wait() {
  if (!is_done()) {
    const detail::WithoutInterpreter scope;
    std::unique_lock lock(state_->mutex);
    awaited_ = true;
    if (queued_) {
      auto& queue = state_->lane_of(*this).queue;
      queue.splice(queue.begin(), queue, *queued_);
    }
    state_->done.wait(lock, [&] { return done_.load(std::memory_order_relaxed); });
  }
  state_->throw_if_lost();
  if (!error_.empty()) throw DiskError(error_);
}

void Disk::Copy::read(void* to) {
  state_->throw_if_lost();
  if (!is_done()) throw std::logic_error("what is under way cannot be read");
  if (!written_) throw DiskError(error_);
  error_.clear();
  if (nbytes_ == 0) return;
  {
    const std::lock_guard guard(state_->mutex);
    state_->enqueue(*this, /*goes_out=*/false, static_cast<char*>(to));
  }
  state_->work.notify_one();
}

}  // namespace rematfn

