// SPDX-License-Identifier: Apache-2.0
//
// Each fault by its name.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <iterator>
#include <thread>

#include "disk_model.h"
#include "memory/checksum.h"
#include "memory/tier_account.h"

namespace rematfn {
namespace {

Fault once(unsigned at, const std::function<Answer(int, std::size_t, off_t)>& answer) {
  return [=, count = std::make_shared<std::atomic<unsigned>>(0)](int file, std::size_t nbytes,
                                                                off_t offset) -> Answer {
    return count->fetch_add(1) == at ? answer(file, nbytes, offset) : Answer{};
  };
}

void full() {
  TestDisk disk(options());
  Value first(300'000, 1);
  Value second(300'000, 2);
  Copy kept = moved(disk, first);
  on_write = once(2, [](int, std::size_t, off_t) { return failing(ENOSPC); });
  Copy lost = write(disk, second);
  const std::string said = error_of([&] { lost->wait(); });
  expect(has(said, "300000 bytes") && has(said, "No space left") && has(said, folder), said);
  expect(second.is_whole() && lost->is_done(), "what did not leave is here");
  expect(!disk.has_room(1) && disk.write(second.begin, 4) == nullptr, "the disk counts as full");
  expect(has(disk.figures().trouble, "No space left"), "and says so");
  lost.reset();
  expect(returns(first, *kept), "nothing else is lost");
  expect(disk.figures().capacity == TierAccount::rounded(300'000), "as much as is held can be held");
  kept.reset();
  expect(disk.has_room(300'000) && !disk.has_room(310'000), "what goes makes room");
  expect(returns(second, *moved(disk, second)), "for others");
}

void broken() {
  TestDisk disk(options());
  Value first(300'000, 1);
  Value second(300'000, 2);
  Copy kept = moved(disk, first);
  on_write = once(1, [](int, std::size_t, off_t) { return failing(EIO); });
  Copy lost = write(disk, second);
  expect(has(error_of([&] { lost->wait(); }), "errno 5"), "a failing write is an error");
  lost.reset();
  kept->wait();
  expect(!disk.has_room(1) && !disk.write(second.begin, 4), "nothing is written to a broken disk");
  expect(disk.figures().capacity == 0 && !disk.figures().trouble.empty(), "it says so");
  expect(returns(first, *kept), "nothing else is lost");
  kept.reset();
  expect(!disk.has_room(1), "it stays broken");
}

// The system tells of it once, to whoever asks next.
void failing_flush() {
  TestDisk disk(options(), /*cached=*/true);
  std::atomic<unsigned> calls{0};
  std::atomic<bool> has_failed{false}, told{false};
  on_write = [&](int, std::size_t, off_t) -> Answer {
    if (calls++ > 0) return {};
    has_failed = true;
    const auto begin = Clock::now();  // the other may come first, if it can
    while (!told && since(begin) < 0.2) std::this_thread::sleep_for(milliseconds(1));
    return {};
  };
  on_sync = [&]() -> std::optional<int> {
    if (!has_failed.exchange(false)) return {};
    told = true;
    errno = EIO;
    return -1;
  };
  const Value value(50'000, 1), other(50'000, 2);
  const Copy lost = write(disk, value);
  while (calls == 0) std::this_thread::yield();
  const Copy kept = write(disk, other);
  const std::string said = error_of([&] { lost->wait(); });
  expect(has(said, "errno 5"), "who wrote it is told: " + said);
  expect(value.is_whole(), "what did not leave is here");
}

void short_of_memory() {
  TestDisk disk(options());
  Value value(300'000, 1);
  on_write = once(1, [](int, std::size_t, off_t) { return failing(ENOMEM); });
  Copy lost = write(disk, value);
  const std::string said = error_of([&] { lost->wait(); });
  expect(has(said, "more memory"), said);
  lost.reset();
  expect(disk.has_room(300'000) && disk.figures().trouble.empty(), "that passes");
  expect(returns(value, *moved(disk, value)), "and others may go");
}

void failing_return() {
  TestDisk disk(options());
  Value value(300'000, 1);
  Copy copy = moved(disk, value);
  on_read = once(1, [](int, std::size_t, off_t) { return failing(EIO); });
  const std::string said = error_of([&] { returns(value, *copy); });
  expect(has(said, "could not read back 300000 bytes") && has(said, "errno 5"), said);
  expect(returns(value, *copy), "what failed once may be tried again");
  expect(!disk.has_room(1), "but nothing more goes there");
}

void short_transfers() {
  for (const bool direct : {true, false}) {
    for (const std::size_t most : {512UL, 4096UL, 5000UL, 20'480UL}) {
      if (direct && most % kPage != 0) continue;  // the system would refuse those
      DiskOptions given = options();
      given.transfers.threads = 1;
      TestDisk disk(given, !direct);
      unsigned calls = 0;
      on_write = on_read = [&, most](int, std::size_t, off_t) -> Answer {
        return {{}, ++calls % 2 == 0 ? SIZE_MAX : most};
      };
      for (const std::size_t shift : {0, 64}) {
        Value value(150'001, 3, shift);
        expect(returns(value, *moved(disk, value)), "short transfers are gone on with");
      }
    }
  }
  TestDisk disk(options());
  on_write = [](int, std::size_t, off_t) -> Answer { return {0}; };
  const Value value(100, 1);
  const Copy copy = write(disk, value);
  expect(!error_of([&] { copy->wait(); }).empty(), "one that gets no further is an error");
}

void checksums() {
  std::map<std::uint64_t, int> seen;
  std::vector<char> bytes(200, 'a');
  for (std::size_t n = 0; n <= bytes.size(); ++n) ++seen[checksum(bytes.data(), n)];
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<char>(1 << bit % 8);
    ++seen[checksum(bytes.data(), bytes.size())];
    bytes[bit / 8] ^= static_cast<char>(1 << bit % 8);
  }
  bytes[90] = 'b';
  std::swap(bytes[3], bytes[90]);
  ++seen[checksum(bytes.data(), bytes.size())];
  expect(seen.size() == 201 + 1600 + 1, "each change is seen");
}

void not_direct() {
  TestDisk disk(options());
  std::atomic<bool> direct{true};  // as the last write found it
  on_write = [&](int file, std::size_t, off_t) -> Answer {
    direct = (fcntl(file, F_GETFL) & O_DIRECT) != 0;
    return direct ? failing(EINVAL) : Answer{};
  };
  Value value(300'000, 1);
  Value aligned(300'000, 2, 0);
  expect(returns(value, *moved(disk, value)), "where the cache cannot be passed by it is used");
  expect(returns(aligned, *moved(disk, aligned)), "from then on");
  expect(!direct && disk.figures().trouble.empty(), "which is no failure");
}

// Pages of the file that are in the page cache.
std::size_t cached_pages(int file) {
  struct stat found {};
  expect(fstat(file, &found) == 0, "the file is there");
  const auto nbytes = static_cast<std::size_t>(found.st_size);
  void* map = mmap(nullptr, nbytes, PROT_READ, MAP_SHARED, file, 0);
  std::vector<unsigned char> pages((nbytes + kPage - 1) / kPage);
  expect(mincore(map, nbytes, pages.data()) == 0, "mincore");
  munmap(map, nbytes);
  return static_cast<std::size_t>(
      std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return page & 1; }));
}

void page_cache() {
  for (const bool direct : {true, false}) {
    TestDisk disk(options(), !direct);
    std::atomic<int> file{-1};
    on_write = [&](int opened, std::size_t, off_t) -> Answer { return file = opened, Answer{}; };
    Value value(8 * kMiB, 1);
    const Copy copy = moved(disk, value);
    const std::size_t all = 8 * kMiB / kPage;
    expect(cached_pages(file) < all / 20, "what was written does not stay in the cache");
    expect(returns(value, *copy), "it comes back");
    expect(cached_pages(file) < all / 20, "what was read does not stay there either");
  }
}

void nameless() {
  TestDisk disk(options());
  const auto entries = [] {
    return std::distance(std::filesystem::directory_iterator(folder), {});
  };
  const auto before = entries();
  Value value(300'000, 1);
  const Copy copy = moved(disk, value);
  expect(returns(value, *copy), "it comes back");
  expect(entries() == before, "its name is gone at once");
}

void no_file() {
  TestDisk disk(options());
  const Value value(100, 1);
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit none{0, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  const Copy copy = disk.write(value.begin, value.nbytes);
  setrlimit(RLIMIT_NOFILE, &before);
  expect(copy == nullptr, "no file, no copy");
  expect(has(disk.figures().trouble, "Too many open files") && !disk.has_room(1), disk.figures().trouble);
}

}  // namespace

Tests fault_tests() {
  return {
      {"full", full},
      {"broken", broken},
      {"failing_flush", failing_flush},
      {"short_of_memory", short_of_memory},
      {"failing_return", failing_return},
      {"short", short_transfers},
      {"checksums", checksums},
      {"not_direct", not_direct},
      {"page_cache", page_cache},
      {"nameless", nameless},
      {"no_file", no_file},
  };
}

}  // namespace rematfn
