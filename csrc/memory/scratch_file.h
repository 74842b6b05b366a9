// SPDX-License-Identifier: Apache-2.0
//
// scratch_file.h: a file for this process alone, that is gone with it, however it ends.

#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>

#include "memory/tier_account.h"

namespace rematfn {

// The system calls that may fail late; tests put others in their place.
struct FileCalls {
  ssize_t (*pread)(int file, void* to, std::size_t nbytes, off_t offset) = ::pread;
  ssize_t (*pwrite)(int file, const void* from, std::size_t nbytes, off_t offset) = ::pwrite;
  int (*sync)(int file) = ::fdatasync;
};

// Page-aligned memory that bytes pass through which lie at no such address. One for each thread.
class Bounce {
 public:
  static constexpr std::size_t kSize = std::size_t{1} << 20;

  // Null if the system gives no memory.
  [[nodiscard]] char* get() {
    if (!memory_) memory_.reset(static_cast<char*>(std::aligned_alloc(TierAccount::kUnit, kSize)));
    return memory_.get();
  }

 private:
  std::unique_ptr<char, decltype(&std::free)> memory_{nullptr, &std::free};
};

// Raises kOffload if `folder` is none, cannot be written to, or is memory itself (a tmpfs).
void check_scratch_folder(const std::string& folder);

// Note [The page cache is no saved memory]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// What is written to a file stays in memory until the system wants it for something else, and counts
// there. So the file is opened past the cache (O_DIRECT). Addresses, offsets and lengths must then be
// aligned to pages; what is not goes through a bounce buffer. Where a file system cannot do that, as a first
// block tells, what was written is flushed and dropped from the cache, chunk by chunk, and so is what was
// read. That a flush has failed the system tells once for each open file, to whoever asks next. So there one
// thread at a time writes and flushes: else one would hear of another's failure, and the other that all went well.
class ScratchFile {
 public:
  // kTruncated: the file is shorter than what was written to it.
  static constexpr int kTruncated = -1;

  // Raises kOffload: which folder, what was asked, what the system answered and what to change.
  ScratchFile(const std::string& folder, const FileCalls& calls);
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  // All of the bytes, at an offset that is a multiple of TierAccount::kUnit, and up to the next such one.
  // Returns 0, an errno, or kTruncated. Thread-safe.
  [[nodiscard]] int write(const char* from, std::size_t nbytes, std::size_t offset, Bounce& bounce);
  [[nodiscard]] int read(char* to, std::size_t nbytes, std::size_t offset, Bounce& bounce);

 private:
  [[nodiscard]] bool can_be_direct() const;
  [[nodiscard]] int write_all(const char* from, std::size_t nbytes, std::size_t offset, Bounce& bounce);
  [[nodiscard]] std::size_t part_without_bounce(const char* memory, std::size_t nbytes) const;
  template <class Transfer>
  int complete(std::size_t nbytes, int at_end, const Transfer& transfer);
  void forget(std::size_t offset, std::size_t nbytes) const;

  int file_ = -1;
  bool direct_ = false;
  std::mutex through_cache_;  // held by who writes and flushes
  const FileCalls calls_;
};

// How messages begin; a name may be any bytes.
[[nodiscard]] std::string said_of(const std::string& folder);
// "No space left on device (errno 28)"
[[nodiscard]] std::string describe_error(int error);

}  // namespace rematfn
