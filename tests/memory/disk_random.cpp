// SPDX-License-Identifier: Apache-2.0
//
// Random transfers from many threads, while system calls fail.
#include <atomic>
#include <limits>
#include <random>
#include <thread>

#include "disk_model.h"

namespace rematfn {
namespace {

constexpr std::size_t kCap = 4 * kMiB;  // which is less than all that there is

struct Chances {
  unsigned fatal = 0;  // one in so many calls; 0: none
  bool direct = true;
  bool verify = false;
  double bandwidth = std::numeric_limits<double>::infinity();
};

// Interrupted, short, late; rarely for good.
Fault at_random(unsigned seed, unsigned fatal, int error) {
  return [=, count = std::make_shared<std::atomic<unsigned>>(seed * 7919)](
             int, std::size_t nbytes, off_t) -> Answer {
    const unsigned dice = count->fetch_add(1) * 2654435761U >> 7;
    if (fatal > 0 && dice % fatal == 0) return failing(error);
    if (dice % 7 == 0) return failing(EINTR);
    if (dice % 5 == 1) return {{}, std::max<std::size_t>(nbytes / 2 / 512 * 512, 512)};
    if (dice % 11 == 2) std::this_thread::sleep_for(std::chrono::microseconds(dice % 500));
    return {};
  };
}

// Returns how many transfers failed.
unsigned random_transfers(unsigned seed, const Chances& chances) {
  DiskOptions given = options(kCap);
  given.transfers.threads = 1 + static_cast<int>(seed % 3);
  given.verify = chances.verify;
  given.transfers.bandwidth = chances.bandwidth;
  TestDisk disk(given, !chances.direct);
  on_write = at_random(seed, chances.fatal, ENOSPC);
  on_read = at_random(seed + 1, chances.fatal, EIO);
  std::atomic<unsigned> failed{0};
  std::atomic<unsigned> refused{0};
  std::atomic<unsigned> moved_out{0};
  std::atomic<unsigned> moved_in{0};
  const auto work = [&](unsigned thread) {
    std::mt19937 random(seed * 100 + thread);
    struct Entry {
      std::unique_ptr<Value> value;
      Copy copy;
      enum { kHere, kLeaving, kAway, kComing } place = kHere;
    };
    std::vector<Entry> entries(12);
    const auto settle = [&](Entry& e) {
      try {
        e.copy->wait();
        expect(e.copy->is_done(), "what was waited for is done");
        ++(e.place == Entry::kLeaving ? moved_out : moved_in);
        if (e.place == Entry::kLeaving) e.value->clear();
        e.place = e.place == Entry::kLeaving ? Entry::kAway : Entry::kHere;
      } catch (const CopyLost& error) {
        ++failed;
        expect(has(error.what(), folder), "the message names the folder");
        if (e.place == Entry::kLeaving) {
          e.place = Entry::kHere;
        } else {
          e.value->fill();  // lost, and said so
          e.place = Entry::kHere;
        }
      }
      if (e.place == Entry::kHere) e.copy.reset();
    };
    for (int i = 0; i < 250; ++i) {
      Entry& e = entries[random() % entries.size()];
      const bool hurries = random() % 3 == 0;
      switch (e.place) {
        case Entry::kHere:
          if (!e.value || random() % 4 == 0) {
            const std::size_t nbytes = random() % 5 == 0 ? random() % 20 : random() % (700 * 1024);
            const std::size_t shift = random() % 3 == 0 ? 0 : 64 * (random() % 64);
            e.value = std::make_unique<Value>(nbytes, random(), shift);
          }
          expect(e.value->is_whole(), "what is here is whole");
          e.copy = disk.write(e.value->begin, e.value->nbytes);
          if (!e.copy) {
            ++refused;
          } else {
            e.place = Entry::kLeaving;
          }
          break;
        case Entry::kLeaving:
          if (hurries) {  // called back
            e.copy.reset();
            e.place = Entry::kHere;
            expect(e.value->is_whole(), "nothing writes to what leaves");
          } else {
            settle(e);
          }
          break;
        case Entry::kAway:
          if (hurries && random() % 4 == 0) {  // asked for no more
            e.copy.reset();
            e.value.reset();
            e.place = Entry::kHere;
          } else {
            e.copy->read(e.value->begin);
            e.place = Entry::kComing;
          }
          break;
        case Entry::kComing:
          if (hurries && random() % 4 == 0) {
            e.copy.reset();
            e.value.reset();  // nothing writes there any more
            e.place = Entry::kHere;
          } else {
            settle(e);
            expect(e.value->is_whole(), "what has come is what left");
          }
          break;
      }
      const auto now = disk.figures();
      expect(now.held <= kCap && now.peak_held <= kCap, "the cap holds");
    }
    for (Entry& e : entries) {
      if (e.copy && random() % 2 == 0) settle(e);
    }
  };
  std::vector<std::thread> all;
  for (unsigned thread = 0; thread < 3; ++thread) all.emplace_back(work, thread);
  for (std::thread& thread : all) thread.join();
  const auto now = disk.figures();
  expect(now.held == 0 && now.out.queued == 0 && now.in.queued == 0, "nothing is held or queued");
  expect(chances.fatal > 0 || now.peak_held > kCap / 2, "the cap is put to the test");
  if (chances.fatal == 0) {
    expect(failed == 0 && disk.figures().trouble.empty(), "what can be gone on with is no failure");
    expect(moved_out > 50 && moved_in > 50 && refused > 0, "much is moved");
    expect(now.capacity == kCap && disk.has_room(kCap), "all can be had again");
  }
  return failed;
}

void in_all_ways() {
  unsigned failed = 0;
  for (unsigned seed = 0; seed < 12; ++seed) {
    Chances chances;
    chances.direct = seed % 4 != 3;
    chances.verify = seed % 2 == 1;
    if (seed % 3 == 2) chances.fatal = 900;
    if (seed % 6 == 4) chances.bandwidth = 3e8;
    failed += random_transfers(seed, chances);
  }
  expect(failed > 0, "failures are put to the test");
}

}  // namespace

Tests random_tests() {
  return {
      {"random", in_all_ways},
  };
}

}  // namespace rematfn
