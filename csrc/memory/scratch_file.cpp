// SPDX-License-Identifier: Apache-2.0
#include "memory/scratch_file.h"

#include <fcntl.h>
#include <sys/statfs.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <system_error>

#include "base/errors.h"

namespace rematfn {
namespace {

constexpr std::size_t kBlock = TierAccount::kUnit;
constexpr int kTries = 16;  // of a transfer that gets no further

[[noreturn]] void refuse(const std::string& folder, const std::string& why) {
  raise(ErrorKind::kOffload, said_of(folder) + why);
}

bool is_memory(const std::string& folder) {
  constexpr std::uint32_t kTmpfs = 0x01021994;
  constexpr std::uint32_t kRamfs = 0x858458f6;
  constexpr std::uint32_t kHugetlbfs = 0x958458f6;
  struct statfs found {};
  if (statfs(folder.c_str(), &found) != 0) return false;
  const auto type = static_cast<std::uint32_t>(found.f_type);
  return type == kTmpfs || type == kRamfs || type == kHugetlbfs;
}

// A file there, for its owner alone, that has a name no longer. Not all file systems have files without one.
int make_file(const std::string& folder) {
  std::string path = folder + "/.rematfn-XXXXXX";
  const int file = mkostemp(path.data(), O_CLOEXEC);
  if (file < 0) {
    refuse(folder, "could not make a file: " + describe_error(errno) +
                       ". Name another directory, on a disk, or see that this one is there, can be written to and has "
                       "room.");
  }
  unlink(path.c_str());
  return file;
}

}  // namespace

std::string said_of(const std::string& folder) {
  return "the disk tier in \"" + folder + "\": ";
}

std::string describe_error(int error) {
  return std::generic_category().message(error) + " (errno " + std::to_string(error) + ")";
}

void check_scratch_folder(const std::string& folder) {
  if (is_memory(folder)) {
    refuse(folder, "lies in memory (a tmpfs), so nothing would be saved. Name a directory on a disk.");
  }
  close(make_file(folder));
}

ScratchFile::ScratchFile(const std::string& folder, const FileCalls& calls) : calls_(calls) {
  file_ = make_file(folder);
  direct_ = can_be_direct();
  if (direct_) return;
  fcntl(file_, F_SETFL, O_RDWR);
  posix_fadvise(file_, 0, 0, POSIX_FADV_RANDOM);  // nothing is read ahead, into the cache
}

ScratchFile::~ScratchFile() { close(file_); }

// Some file systems say so when something is written.
bool ScratchFile::can_be_direct() const {
  if (fcntl(file_, F_SETFL, O_RDWR | O_DIRECT) != 0) return false;
  Bounce bounce;
  char* const block = bounce.get();
  if (block == nullptr) return true;
  std::memset(block, 0, kBlock);
  return calls_.pwrite(file_, block, kBlock, 0) >= 0 || errno != EINVAL;
}

// What can be transferred from or to `memory` as it lies there; the rest takes the bounce buffer.
std::size_t ScratchFile::part_without_bounce(const char* memory, std::size_t nbytes) const {
  if (!direct_) return nbytes;
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(memory) % kBlock == 0;
  return is_aligned ? nbytes / kBlock * kBlock : 0;
}

// Calls `transfer(done, left)` until nothing is left; it returns as pread and pwrite do, and sets
// `errno`. `at_end` is the answer to a transfer that gets no further.
template <class Transfer>
int ScratchFile::complete(std::size_t nbytes, int at_end, const Transfer& transfer) {
  int tries = 0;
  for (std::size_t done = 0; done < nbytes;) {
    const ssize_t found = transfer(done, nbytes - done);
    if (found == 0) return at_end;
    auto more = static_cast<std::size_t>(std::max<ssize_t>(found, 0));
    if (found < 0) {
      if (errno != EINTR && errno != EAGAIN) return errno;
    } else if (more < nbytes - done && direct_) {
      more = more / kBlock * kBlock;  // whatever follows must be aligned too
    }
    done += std::min(more, nbytes - done);
    tries = more > 0 ? 0 : tries + 1;
    if (tries > kTries) return found < 0 ? errno : at_end;
  }
  return 0;
}

int ScratchFile::write(const char* from, std::size_t nbytes, std::size_t offset, Bounce& bounce) {
  if (direct_) return write_all(from, nbytes, offset, bounce);
  // See Note [The page cache is no saved memory]
  const std::lock_guard guard(through_cache_);
  const int error = write_all(from, nbytes, offset, bounce);
  if (error != 0) return error;
  // Only now does the system look for room, perhaps. Some file systems cannot be asked.
  const bool failed = calls_.sync(file_) != 0 && (errno == ENOSPC || errno == EDQUOT || errno == EIO);
  if (failed) return errno;
  forget(offset, nbytes);
  return 0;
}

int ScratchFile::write_all(const char* from, std::size_t nbytes, std::size_t offset, Bounce& bounce) {
  return complete(nbytes, EIO, [&](std::size_t done, std::size_t left) -> ssize_t {
    const char* source = from + done;
    std::size_t size = part_without_bounce(source, left);
    if (size == 0) {
      char* const buffer = bounce.get();
      if (buffer == nullptr) return errno = ENOMEM, -1;
      const std::size_t part = std::min(left, Bounce::kSize);
      size = TierAccount::rounded(part);
      std::memcpy(buffer, source, part);
      std::memset(buffer + part, 0, size - part);
      source = buffer;
    }
    return calls_.pwrite(file_, source, size, static_cast<off_t>(offset + done));
  });
}

int ScratchFile::read(char* to, std::size_t nbytes, std::size_t offset, Bounce& bounce) {
  const int error = complete(nbytes, kTruncated, [&](std::size_t done, std::size_t left) -> ssize_t {
    const auto at = static_cast<off_t>(offset + done);
    const std::size_t size = part_without_bounce(to + done, left);
    if (size > 0) return calls_.pread(file_, to + done, size, at);
    char* const buffer = bounce.get();
    if (buffer == nullptr) return errno = ENOMEM, -1;
    const std::size_t part = std::min(left, Bounce::kSize);
    const ssize_t found = calls_.pread(file_, buffer, TierAccount::rounded(part), at);
    if (found > 0) std::memcpy(to + done, buffer, std::min<std::size_t>(found, part));
    return found;
  });
  if (!direct_) forget(offset, nbytes);
  return error;
}

// See Note [The page cache is no saved memory]
void ScratchFile::forget(std::size_t offset, std::size_t nbytes) const {
  const auto count = static_cast<off_t>(TierAccount::rounded(nbytes));
  posix_fadvise(file_, static_cast<off_t>(offset), count, POSIX_FADV_DONTNEED);
}

}  // namespace rematfn
