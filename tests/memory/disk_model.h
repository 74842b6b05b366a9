// SPDX-License-Identifier: Apache-2.0
//
// disk_model.h: system calls that fail, values that know what they were.

#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model.h"
#include "tensors/disk.h"

namespace rematfn {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::size_t kPage = 4096;
constexpr std::size_t kMiB = std::size_t{1} << 20;

inline std::string folder;  // on a disk

inline double since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// ---- system calls that fail -------------------------------------------------------------------

// Nothing: the system is asked, for `most` at most.
struct Answer {
  std::optional<ssize_t> instead;
  std::size_t most = SIZE_MAX;
};
using Fault = std::function<Answer(int file, std::size_t nbytes, off_t offset)>;
inline Fault on_write;
inline Fault on_read;
inline std::function<std::optional<int>()> on_sync;
inline bool is_cached = false;  // the file system does not let the page cache be passed by

inline Answer failing(int error) {
  errno = error;
  return {-1};
}

inline const FileCalls kCalls{
    .pread = [](int file, void* to, std::size_t nbytes, off_t offset) -> ssize_t {
      const Answer answer = on_read ? on_read(file, nbytes, offset) : Answer{};
      if (answer.instead) return *answer.instead;
      return ::pread(file, to, std::min(nbytes, answer.most), offset);
    },
    .pwrite = [](int file, const void* from, std::size_t nbytes, off_t offset) -> ssize_t {
      if (is_cached && (fcntl(file, F_GETFL) & O_DIRECT) != 0) return errno = EINVAL, -1;
      const Answer answer = on_write ? on_write(file, nbytes, offset) : Answer{};
      if (answer.instead) return *answer.instead;
      return ::pwrite(file, from, std::min(nbytes, answer.most), offset);
    },
    .sync = [](int file) {
      const auto instead = on_sync ? on_sync() : std::nullopt;
      return instead ? *instead : ::fdatasync(file);
    },
};

// ---- bytes instead of tensors -----------------------------------------------------------------

class TensorDomain {};  // of which a disk asks nothing

inline c10::Storage storage_on(const void* bytes, std::size_t nbytes) {
  return {c10::Storage::use_byte_size_t(), nbytes,
          c10::DataPtr(const_cast<void*>(bytes), c10::DeviceType::CPU)};
}

class TestCopy {
 public:
  explicit TestCopy(std::unique_ptr<Tier::Copy> copy) : copy_(std::move(copy)) {}
  void read(void* to) { copy_->get(storage_on(to, copy_->nbytes)); }
  void wait() { copy_->wait(/*returning=*/false); }
  [[nodiscard]] bool is_done() const { return copy_->is_done(); }

 private:
  std::unique_ptr<Tier::Copy> copy_;
};
using Copy = std::unique_ptr<TestCopy>;

// Without faults, to begin with. They may change while nothing is under way.
class TestDisk {
 public:
  explicit TestDisk(const DiskOptions& options, bool cached = false) : tier_(make_disk(options, kCalls)) {
    on_write = on_read = nullptr;
    on_sync = nullptr;
    is_cached = cached;
  }
  // Null if there is no room.
  [[nodiscard]] Copy write(const void* bytes, std::size_t nbytes) {
    auto copy = tier_->put(storage_on(bytes, nbytes), domain_, std::make_shared<Tier::Waits>());
    return copy ? std::make_unique<TestCopy>(std::move(copy)) : nullptr;
  }
  [[nodiscard]] bool has_room(std::size_t nbytes) const {
    return tier_->has_room(storage_on(nullptr, nbytes));
  }
  [[nodiscard]] TierFigures figures() const { return tier_->figures(); }
  [[nodiscard]] std::size_t queued_to_read() const { return tier_->queued_in(); }

 private:
  std::shared_ptr<Tier> tier_;
  TensorDomain domain_;
};

inline DiskOptions options(std::size_t budget = 64 * kMiB) {
  return {.folder = folder, .budget = budget, .transfers = {.chunk = 64 * 1024}};
}

// ---- values -----------------------------------------------------------------------------------

struct Value {
  // Where tensors lie: at a multiple of 64, of 4096 perhaps.
  Value(std::size_t n, unsigned filling, std::size_t shift = 64)
      : nbytes(n), seed(filling), memory(n + 2 * kPage) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    begin = memory.data() + (kPage - address % kPage) + shift % kPage;
    fill();
  }
  [[nodiscard]] char at(std::size_t i) const {
    return static_cast<char>((i * 2654435761U + seed * 40503U) >> 13);
  }
  void fill() {
    for (std::size_t i = 0; i < nbytes; ++i) begin[i] = at(i);
  }
  void clear() { std::memset(begin, 0x55, nbytes); }
  [[nodiscard]] bool is_whole() const {
    for (std::size_t i = 0; i < nbytes; ++i) {
      if (begin[i] != at(i)) return false;
    }
    return true;
  }

  std::size_t nbytes;
  unsigned seed;
  std::vector<char> memory;
  char* begin;
};

// Whether it comes back as it was.
inline bool returns(Value& value, TestCopy& copy) {
  value.clear();
  copy.read(value.begin);
  copy.wait();
  return value.is_whole();
}

inline Copy write(TestDisk& disk, const Value& value) {
  Copy copy = disk.write(value.begin, value.nbytes);
  expect(copy != nullptr, "there is room: " + disk.figures().trouble);
  return copy;
}

inline Copy moved(TestDisk& disk, const Value& value) {
  Copy copy = write(disk, value);
  copy->wait();
  return copy;
}

inline std::string error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const CopyLost& error) {
    return error.what();
  }
  return "";
}

inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

Tests random_tests();
Tests fault_tests();
Tests order_tests();

}  // namespace rematfn
