// SPDX-License-Identifier: Apache-2.0
#include "stream.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

// Python's own, found in the process.
extern "C" {
int Py_IsInitialized();
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void* state);
}

namespace fake {

thread_local Running running;

WithoutInterpreter::WithoutInterpreter() {
  if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) state_ = PyEval_SaveThread();
}

WithoutInterpreter::~WithoutInterpreter() {
  if (state_ != nullptr) PyEval_RestoreThread(state_);
}

// ---- delays ---------------------------------------------------------------------------------

namespace {

struct Delays {
  std::atomic<std::uint64_t> seed{0};
  std::atomic<int> most{0};  // microseconds
};
Delays delays;

// One job in four is late. Each stream has numbers of its own, so that none depends on the others'.
void delay(c10::StreamId stream) {
  const int most = delays.most.load(std::memory_order_relaxed);
  if (most == 0) return;
  static thread_local std::uint64_t seed = 0;
  static thread_local std::minstd_rand random;
  if (std::exchange(seed, delays.seed.load()) != seed) {
    random.seed(static_cast<unsigned>(seed + 977 * static_cast<std::uint64_t>(stream)));
  }
  if (random() % 4 == 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % static_cast<unsigned>(most)));
  }
}

}  // namespace

// ---- streams --------------------------------------------------------------------------------

Stream::Stream(c10::StreamId id) : id(id) {
  std::thread([this] { work(); }).detach();
}

void Stream::work() {
  running.stream = id;
  const at::AutoDispatchBelowADInplaceOrView kernels_only;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !queue_.empty(); });
    Job job = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    delay(id);
    std::exception_ptr error;
    running.what = job.what;
    try {
      job.run();
    } catch (...) {
      error = std::current_exception();
    }
    running.what = nullptr;
    job.run = nullptr;  // what it holds goes before anybody hears that it is done
    lock.lock();
    if (error && !error_) error_ = error;
    ++done_;
    changed_.notify_all();
  }
}

void Stream::enqueue(const char* what, std::function<void()> job) {
  Graph* const graph = captured_on(id);
  if (graph == nullptr) return enqueue_uncaptured(what, std::move(job));
  const std::lock_guard lock(mutex_);
  graph->jobs.push_back({what, std::move(job)});
}

void Stream::enqueue_uncaptured(const char* what, std::function<void()> job) {
  const std::lock_guard lock(mutex_);
  queue_.push_back({what, std::move(job)});
  ++enqueued_;
  changed_.notify_all();
}

bool Stream::is_idle() {
  refuse_if_captured(id);
  const std::lock_guard lock(mutex_);
  return done_ == enqueued_;
}

void Stream::wait() {
  refuse_if_captured(id);
  const WithoutInterpreter without;
  std::unique_lock lock(mutex_);
  const std::uint64_t until = enqueued_;
  changed_.wait(lock, [&] { return done_ >= until; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

namespace {

struct Streams {
  std::mutex mutex;
  std::vector<Stream*> all{new Stream(0)};
  std::vector<Stream*> pool;
  std::size_t next = 0;

  // With the lock held.
  Stream& make() { return *all.emplace_back(new Stream(static_cast<c10::StreamId>(all.size()))); }
};

// Never destroyed, as its threads never end. Before the process does, they finish their work.
Streams& streams() {
  static auto* const instance = [] {
    std::atexit([] {
      try {
        wait_for_all_streams();
      } catch (const std::exception&) {
        // Nobody is left who could be told.
      }
    });
    return new Streams;
  }();
  return *instance;
}

thread_local c10::StreamId current = 0;

}  // namespace

Stream& stream(c10::StreamId id) {
  Streams& s = streams();
  const std::lock_guard lock(s.mutex);
  TORCH_CHECK(id >= 0 && id < static_cast<c10::StreamId>(s.all.size()), "no stream ", id);
  return *s.all[static_cast<std::size_t>(id)];
}

Stream& new_stream() {
  Streams& s = streams();
  const std::lock_guard lock(s.mutex);
  return s.make();
}

Stream& stream_from_pool() {
  constexpr std::size_t kPool = 4;
  Streams& s = streams();
  const std::lock_guard lock(s.mutex);
  if (s.pool.size() < kPool) return *s.pool.emplace_back(&s.make());
  return *s.pool[s.next++ % kPool];
}

Stream& current_stream() { return stream(current); }
void set_current_stream(c10::StreamId id) { current = id; }

void wait_for_all_streams() {
  std::vector<Stream*> all;
  {
    Streams& s = streams();
    const std::lock_guard lock(s.mutex);
    all = s.all;
  }
  for (Stream* s : all) {
    if (captured_on(s->id) == nullptr) s->wait();
  }
}

// ---- graphs ---------------------------------------------------------------------------------

namespace {

std::atomic<Graph*> capturing{nullptr};

}  // namespace

bool is_any_captured() { return capturing.load() != nullptr; }

Graph* captured_on(c10::StreamId id) {
  Graph* const graph = capturing;
  return graph != nullptr && graph->stream == id ? graph : nullptr;
}

void refuse_if_captured(c10::StreamId id) {
  TORCH_CHECK(captured_on(id) == nullptr, "not permitted while a stream is captured");
}

void Graph::replay(Stream& on) const {
  for (const Job& job : jobs) on.enqueue(job.what, job.run);
}

// ---- events ---------------------------------------------------------------------------------

void Event::State::wait_until(std::uint64_t version) {
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return reached >= version; });
}

void Event::record(Stream& stream) {
  std::uint64_t version = 0;
  {
    const std::lock_guard lock(state_->mutex);
    state_->captured = captured_on(stream.id) != nullptr;
    if (state_->captured) return;
    version = ++state_->recorded;
  }
  stream.enqueue("an event", [state = state_, version] {
    const std::lock_guard lock(state->mutex);
    state->reached = std::max(state->reached, version);
    state->time = std::chrono::steady_clock::now();
    state->changed.notify_all();
  });
}

void Event::block(Stream& stream) {
  std::unique_lock lock(state_->mutex);
  TORCH_CHECK(state_->captured == (captured_on(stream.id) != nullptr),
              "a captured stream may not wait for one that is not, nor that for it");
  if (state_->captured) return;
  const std::uint64_t version = state_->recorded;
  if (state_->reached >= version) return;
  lock.unlock();
  stream.enqueue("the wait for an event", [state = state_, version] { state->wait_until(version); });
}

bool Event::is_reached() {
  TORCH_CHECK(!is_any_captured(), "not permitted while a stream is captured");
  const std::lock_guard lock(state_->mutex);
  return state_->reached == state_->recorded;
}

void Event::wait() {
  TORCH_CHECK(!is_any_captured(), "not permitted while a stream is captured");
  const WithoutInterpreter without;
  std::unique_lock lock(state_->mutex);
  const std::uint64_t version = state_->recorded;
  lock.unlock();
  state_->wait_until(version);
}

std::chrono::steady_clock::time_point Event::time() {
  const std::lock_guard lock(state_->mutex);
  return state_->time;
}

}  // namespace fake

// ---- what the tests ask for -----------------------------------------------------------------

extern "C" {

// Jobs are late by up to `most` microseconds; 0: none is.
void fake_delay(std::uint64_t seed, int most) {
  fake::delays.seed = seed;
  fake::delays.most = most;
}

// Stops a stream at this point of its queue, until the gate is opened.
void* fake_close_gate(std::int64_t stream) {
  auto* gate = new std::shared_ptr<std::atomic<bool>>(new std::atomic<bool>(false));
  fake::stream(stream).enqueue("a gate", [open = *gate] { open->wait(false); });
  return gate;
}

void* fake_begin_capture(std::int64_t stream) {
  static int graphs = 0;
  auto* graph = new fake::Graph{stream, ++graphs, {}};
  fake::capturing = graph;
  return graph;
}

void fake_end_capture() { fake::capturing = nullptr; }

void fake_replay(const void* graph, std::int64_t stream) {
  static_cast<const fake::Graph*>(graph)->replay(fake::stream(stream));
}

void fake_open_gate(void* opaque) {
  auto* gate = static_cast<std::shared_ptr<std::atomic<bool>>*>(opaque);
  (*gate)->store(true);
  (*gate)->notify_all();
  delete gate;
}

}  // extern "C"
