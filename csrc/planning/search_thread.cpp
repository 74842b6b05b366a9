// SPDX-License-Identifier: Apache-2.0
#include "planning/search_thread.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <system_error>
#include <thread>

#include "base/background.h"

namespace rematfn {
namespace {

constexpr std::size_t kMostWaiting = 256;  // beyond, those that have waited longest are forgotten
constexpr int kNicer = 10;

struct Request {
  std::weak_ptr<Program> program;
  std::size_t budget;
  SearchLimits limits;
};

// Of this process; a forked child has one of its own. Never destroyed.
struct Searcher {
  std::mutex mutex;
  std::deque<Request> waiting;
  std::shared_ptr<Effort> effort;  // of the search that runs
  const Program* searched = nullptr;
  std::size_t budget = 0;
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

void give_way() {
#ifdef __linux__  // where threads have priorities of their own
  const auto self = static_cast<id_t>(syscall(SYS_gettid));
  const int now = getpriority(PRIO_PROCESS, self);
  static_cast<void>(setpriority(PRIO_PROCESS, self, std::min(now + kNicer, 19)));
#endif
}

void work(Searcher& own) {
  give_way();
  std::unique_lock lock(own.mutex);
  while (!own.waiting.empty()) {
    const Request request = std::move(own.waiting.front());
    own.waiting.pop_front();
    std::shared_ptr<Program> program = request.program.lock();
    if (!program) continue;
    const auto effort = own.effort = std::make_shared<Effort>();
    own.searched = program.get();
    own.budget = request.budget;
    lock.unlock();
    const auto pays = while_it_pays(request.limits, effort);
    const bool done = program->search(
        request.budget, Strategy::kBest, 0,
        [&](double cost) { return program.use_count() > 1 && pays(cost); }, *effort);
    if (done) program->note_searched(request.budget);
    lock.lock();
    own.effort.reset();
    own.searched = nullptr;
    lock.unlock();
    program.reset();  // its memory may be freed here
    lock.lock();
  }
  own.working = false;
}

// The mutex is held.
void start(Searcher& own) {
  if (own.thread.joinable()) own.thread.join();  // it has let go of the mutex for the last time
  try {
    own.thread = start_in_background([&own] { work(own); });
    own.working = true;
  } catch (const std::system_error&) {
    own.waiting.clear();  // no thread is to be had: the plans there are will do
  }
}

}  // namespace

std::mutex& plans_mutex() { return the_searcher().mutex; }

void search_later(const std::shared_ptr<Program>& program, std::size_t budget,
                  const SearchLimits& limits) {
  if (program->has_searched(budget)) return;
  Searcher& own = the_searcher();
  const std::lock_guard guard(own.mutex);
  if (own.ended || (own.searched == program.get() && own.budget == budget)) return;
  const auto same = std::find_if(own.waiting.begin(), own.waiting.end(), [&](const Request& r) {
    return !r.program.owner_before(program) && !program.owner_before(r.program);
  });
  if (same != own.waiting.end()) {
    same->budget = budget;
    return;
  }
  if (own.waiting.size() == kMostWaiting) own.waiting.pop_front();
  own.waiting.push_back({program, budget, limits});
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
    thread = std::move(own.thread);
  }
  if (thread.joinable()) thread.join();
}

}  // namespace rematfn
