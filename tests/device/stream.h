// SPDX-License-Identifier: Apache-2.0
//
// stream.h: a stream is a thread with a queue; an event is a mark in such a queue.

#pragma once

#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace fake {

inline constexpr c10::DeviceType kFake = c10::DeviceType::PrivateUse1;

struct Job {
  const char* what;  // must outlive the process
  std::function<void()> run;
};

class Stream {
 public:
  explicit Stream(c10::StreamId id);

  // Has `job` run after all that was enqueued before; or, while the stream is captured, whenever the graph is
  // replayed.
  void enqueue(const char* what, std::function<void()> job);
  void enqueue_uncaptured(const char* what, std::function<void()> job);
  [[nodiscard]] bool is_idle();
  // Until all that is enqueued now has run. Raises the first error of a job since the last time.
  void wait();

  const c10::StreamId id;

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> queue_;
  std::uint64_t enqueued_ = 0;
  std::uint64_t done_ = 0;
  std::exception_ptr error_;
};

// What is enqueued on a stream while it is captured. As in CUDA, nobody may wait for a stream, or ask it
// something, that is captured, nor have it wait for what is not; the memory that is asked for then is the graph's.
struct Graph {
  const c10::StreamId stream;
  const int pool;
  std::vector<Job> jobs;

  void replay(Stream& on) const;
};

// Null: none. One at a time, on one stream.
[[nodiscard]] Graph* captured_on(c10::StreamId id);
[[nodiscard]] bool is_any_captured();
// Raises if the stream is captured.
void refuse_if_captured(c10::StreamId id);

// Streams are numbered from 0, the default stream, and live until the process ends.
[[nodiscard]] Stream& stream(c10::StreamId id);
[[nodiscard]] Stream& new_stream();
[[nodiscard]] Stream& stream_from_pool();

// The calling thread's.
[[nodiscard]] Stream& current_stream();
void set_current_stream(c10::StreamId id);

void wait_for_all_streams();

// What the calling thread is running, if it is a stream's, for a message after a crash.
struct Running {
  const char* what = nullptr;
  c10::StreamId stream = -1;
};
extern thread_local Running running;

class Event {
 public:
  void record(Stream& stream);
  void block(Stream& stream);
  [[nodiscard]] bool is_reached();
  void wait();
  // When the stream came to it last.
  [[nodiscard]] std::chrono::steady_clock::time_point time();

 private:
  // Jobs may outlive the event.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::uint64_t recorded = 0;
    std::uint64_t reached = 0;
    bool captured = false;  // in a graph, when it was recorded last
    std::chrono::steady_clock::time_point time;

    void wait_until(std::uint64_t version);
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// A thread that waits for a stream must not keep Python's lock: a kernel may be written in Python.
class WithoutInterpreter {
 public:
  WithoutInterpreter();
  ~WithoutInterpreter();
  WithoutInterpreter(const WithoutInterpreter&) = delete;
  WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;

 private:
  void* state_ = nullptr;
};

}  // namespace fake
