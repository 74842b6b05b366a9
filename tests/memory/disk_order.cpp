// SPDX-License-Identifier: Apache-2.0
//
// Sizes, and the order of transfers.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <fstream>
#include <iterator>
#include <mutex>
#include <thread>
#include <utility>

#include "disk_model.h"
#include "memory/tier_account.h"

namespace rematfn {
namespace {

// ---- sizes ------------------------------------------------------------------------------------

// The bytes are not there, so that this takes neither the memory nor the time.
void large_values() {
  constexpr std::size_t kBytes = (std::size_t{5} << 30) + 100;
  DiskOptions given = options(std::size_t{6} << 30);
  given.transfers.chunk = std::size_t{3} << 30;  // more than one call transfers
  TestDisk disk(given);
  std::mutex mutex;
  std::map<off_t, std::size_t> seen;
  on_write = on_read = [&](int, std::size_t nbytes, off_t offset) -> Answer {
    constexpr std::size_t kMost = 0x7ffff000;
    const std::lock_guard guard(mutex);
    return {static_cast<ssize_t>(seen[offset] = std::min(nbytes, kMost))};
  };
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  expect(memory != MAP_FAILED, "addresses are to be had");
  const auto covers = [&] {
    std::size_t end = 0;
    for (const auto& [offset, nbytes] : std::exchange(seen, {})) {
      if (static_cast<std::size_t>(offset) != end) return false;
      end += nbytes;
    }
    return end == TierAccount::rounded(kBytes);
  };
  const Copy copy = disk.write(memory, kBytes);
  copy->wait();
  expect(covers(), "all of it is written, once");
  copy->read(memory);
  copy->wait();
  expect(covers(), "and read");
  expect(disk.figures().out.bytes == kBytes && disk.figures().held > kBytes, "and counted");
  munmap(memory, kBytes);
}

// ---- order -------------------------------------------------------------------------------------

// A chunk that is under way until the gate opens.
struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_open = false;
  std::atomic<int> waiting{0};

  void pass() {
    std::unique_lock lock(mutex);
    ++waiting;
    changed.wait(lock, [&] { return is_open; });
    --waiting;
  }
  void open() {
    const std::lock_guard guard(mutex);
    is_open = true;
    changed.notify_all();
  }
};

// Until a thread of this process sleeps.
void await_sleep(pid_t thread) {
  const std::string path = "/proc/self/task/" + std::to_string(thread) + "/stat";
  while (true) {
    std::ifstream file(path);
    const std::string text(std::istreambuf_iterator<char>(file), {});
    if (has(text, ") S ")) return;
    std::this_thread::yield();
  }
}

void discarded_while_under_way() {
  for (const bool comes : {false, true}) {
    TestDisk disk(options());
    Value other(10'000, 7);
    const Copy kept = moved(disk, other);
    constexpr std::size_t kBytes = 10 * kMiB;
    void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    std::atomic<unsigned> calls{0};
    Gate gate;
    const Fault slow = [&](int, std::size_t, off_t) -> Answer {
      ++calls;
      gate.pass();
      return {};
    };
    (comes ? on_read : on_write) = slow;
    Copy copy = disk.write(memory, kBytes);
    if (comes) copy->wait(), copy->read(memory);
    while (gate.waiting < 2) std::this_thread::yield();
    std::thread opener([&, waits = gettid()] {
      await_sleep(waits);
      gate.open();
    });
    copy.reset();
    munmap(memory, kBytes);  // whoever still reads or writes there fails
    expect(calls == 2, "what has not begun is cancelled");
    opener.join();
    std::this_thread::sleep_for(milliseconds(60));
    expect(calls == 2 && disk.figures().trouble.empty(), "and nothing goes on");
    expect(disk.figures().held == TierAccount::rounded(10'000), "its room is free");
    expect(disk.queued_to_read() + disk.figures().out.queued == 0, "nothing is queued");
    expect(returns(other, *kept), "others are not concerned");
  }
}

void returns_go_first() {
  DiskOptions given = options();
  given.transfers.threads = 1;
  TestDisk disk(given);
  std::vector<Value> values;
  std::vector<Copy> away;
  for (unsigned i = 0; i < 12; ++i) values.emplace_back(5000, i);
  for (const Value& value : values) away.push_back(moved(disk, value));
  Gate gate;
  std::mutex mutex;
  std::string order;
  on_write = [&](int, std::size_t, off_t) -> Answer {
    gate.pass();
    const std::lock_guard guard(mutex);
    order += 'w';
    return {};
  };
  on_read = [&](int, std::size_t, off_t) -> Answer {
    const std::lock_guard guard(mutex);
    order += 'r';
    return {};
  };
  std::vector<Copy> leaving;
  for (int i = 0; i < 4; ++i) leaving.push_back(write(disk, values[0]));
  while (gate.waiting == 0) std::this_thread::yield();
  for (std::size_t i = 1; i < 12; ++i) away[i]->read(values[i].begin);
  expect(disk.figures().out.queued == 20'000 && disk.queued_to_read() == 55'000, "all are queued");
  gate.open();
  for (const Copy& copy : away) copy->wait();
  for (const Copy& copy : leaving) copy->wait();
  // One write was under way.
  expect(order == "wrrrrrrrrrrrwww", "returns go first: " + order);
}

void what_is_awaited_overtakes() {
  DiskOptions given = options();
  given.transfers.threads = 1;
  TestDisk disk(given);
  Value value(4096, 1, 0);
  moved(disk, value).reset();  // by now there is a file
  Gate gate;
  std::mutex mutex;
  std::vector<off_t> order;
  on_write = [&](int, std::size_t, off_t offset) -> Answer {
    gate.pass();
    const std::lock_guard guard(mutex);
    order.push_back(offset);
    return {};
  };
  std::vector<Copy> leaving;
  for (int i = 0; i < 6; ++i) leaving.push_back(write(disk, value));
  while (gate.waiting == 0) std::this_thread::yield();
  std::atomic<pid_t> waits{0};
  std::thread waiter([&] {
    waits = gettid();
    leaving[4]->wait();
  });
  while (waits == 0) std::this_thread::yield();
  await_sleep(waits);
  gate.open();
  waiter.join();
  for (const Copy& copy : leaving) copy->wait();
  expect(order == std::vector<off_t>{0, 16384, 4096, 8192, 12288, 20480}, "the one that is awaited");
}

}  // namespace

Tests order_tests() {
  return {
      {"large_values", large_values},
      {"discard", discarded_while_under_way},
      {"returns_go_first", returns_go_first},
      {"awaited", what_is_awaited_overtakes},
  };
}

}  // namespace rematfn
