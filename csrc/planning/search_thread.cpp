// SPDX-License-Identifier: Apache-2.0
#include "planning/search_thread.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <system_error>
#include <thread>

#include "base/background.h"
#include "base/condition_variable.h"

namespace rematfn {
namespace {

constexpr std::uint64_t kTurn = 25'000;  // operators: some plans of settings, and a schedule

// Of this process; a forked child has one of its own. Never destroyed.
struct Searcher {
  std::mutex mutex;
  std::condition_variable changed;  // something has been simulated, or has ended
  std::deque<std::weak_ptr<Program>> waiting;  // for the thread
  std::shared_ptr<Effort> effort;  // of what the thread simulates
  const Program* searched = nullptr;  // by the thread
  std::thread thread;
  bool working = false;  // the thread runs, and will look at `waiting` once more
  bool ended = false;
};

Searcher* searcher = nullptr;

void before_fork() { searcher->mutex.lock(); }
void after_fork_in_parent() { searcher->mutex.unlock(); }
void after_fork_in_child() {
  const bool ended = searcher->ended;
  searcher = new Searcher;
  searcher->ended = ended;
}

// See Note [A search needs nothing of the interpreter]
Searcher& the_searcher() {
  static const bool made = [] {
    searcher = new Searcher;
    pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child);
    std::atexit(&end_searches);
    return true;
  }();
  static_cast<void>(made);
  return *searcher;
}

// See Note [A search takes what nobody wants]
void give_way() {
  const sched_param none{};
  static_cast<void>(sched_setscheduler(0, SCHED_IDLE, &none));  // of this thread
}

// Simulates the next plan of `search`, or waits while somebody else does. There is one, and the mutex is
// held, but not meanwhile. Throws Stopped; then that plan comes next again.
void simulate_next(Searcher& own, Search& search, Effort& effort,
                   std::unique_lock<std::mutex>& lock) {
  if (search.simulated_in == &own) return wait_on(own.changed, lock);
  const std::shared_ptr<const Plan> plan = search.next();
  const std::uint64_t before = effort.operators;
  search.simulated_in = &own;
  const auto end = [&] {
    lock.lock();
    search.simulated_in = nullptr;
    own.changed.notify_all();
  };
  Search::Found found;
  lock.unlock();
  try {
    found = search.simulate(plan, effort);
  } catch (...) {
    end();
    throw;
  }
  end();
  search.note_result(found, effort.operators - before);
}

// Beside the calls, until it is over, or another waits and it has had its turn. Returns whether it is to go on.
// The mutex is held, but not all the time.
bool search_beside(Searcher& own, const std::shared_ptr<Program>& program,
                   std::unique_lock<std::mutex>& lock) {
  own.effort = std::make_shared<Effort>();
  own.searched = program.get();
  bool goes_on = true;
  try {
    while (goes_on && (own.waiting.empty() || own.effort->operators < kTurn)) {
      const std::shared_ptr<Search> search = program->begun();
      goes_on = !own.ended && program.use_count() > 1 && search->goes_on(Until::kOver);
      if (goes_on) simulate_next(own, *search, *own.effort, lock);
    }
  } catch (const Stopped&) {
    goes_on = false;
  }
  own.effort.reset();
  own.searched = nullptr;
  return goes_on;
}

void work(Searcher& own) {
  give_way();
  std::unique_lock lock(own.mutex);
  while (!own.waiting.empty()) {
    std::shared_ptr<Program> program = own.waiting.front().lock();
    own.waiting.pop_front();
    if (!program) continue;
    if (search_beside(own, program, lock)) own.waiting.push_back(program);
    lock.unlock();
    program.reset();  // its memory may be freed here
    lock.lock();
  }
  own.working = false;
}

// The mutex is held.
void start(Searcher& own) {
  if (own.thread.joinable()) own.thread.join();  // it has unlocked the mutex for the last time
  try {
    own.thread = start_in_background([&own] { work(own); });
    own.working = true;
  } catch (const std::system_error&) {
    own.waiting.clear();  // no thread is to be had: the plans there are will do
  }
}

}  // namespace

std::mutex& plans_mutex() { return the_searcher().mutex; }

void go_on(Search& search, Until until, std::unique_lock<std::mutex>& lock) {
  Effort effort;
  while (search.goes_on(until)) simulate_next(the_searcher(), search, effort, lock);
}

void search_later(const std::shared_ptr<Program>& program) {
  Searcher& own = the_searcher();
  const std::lock_guard guard(own.mutex);
  if (own.ended || own.searched == program.get()) return;
  if (!program->begun() || !program->begun()->goes_on(Until::kOver)) return;
  if (std::ranges::any_of(own.waiting, [&](const auto& other) { return other.lock() == program; })) return;
  own.waiting.push_back(program);
  if (!own.working) start(own);
}

bool is_searching() {
  Searcher& own = the_searcher();
  const std::lock_guard guard(own.mutex);
  return own.working;
}

void end_searches() {
  Searcher& own = the_searcher();
  std::thread thread;
  {
    const std::lock_guard guard(own.mutex);
    own.ended = true;
    own.waiting.clear();
    if (own.effort) own.effort->stop = true;
    own.changed.notify_all();
    thread = std::move(own.thread);
  }
  if (thread.joinable()) thread.join();
}

}  // namespace rematfn
