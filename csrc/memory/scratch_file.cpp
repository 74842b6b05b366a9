// SPDX-License-Identifier: Apache-2.0
#include "memory/scratch_file.h"

#include <sys/stat.h>
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

bool has_no_nameless_files(int error) {
  return error == EOPNOTSUPP || error == EISDIR || error == EINVAL || error == ENOENT;
}

// A file without a name there, or with one no longer.
int make_file(const std::string& folder, const FileCalls& calls) {
  int file = calls.open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR);
  if (file < 0 && has_no_nameless_files(errno)) {
    std::string path = folder + "/.rematfn-XXXXXX";
    file = mkostemp(path.data(), O_CLOEXEC);  // for its owner alone
    if (file >= 0) unlink(path.c_str());
  }
  if (file < 0) {
    refuse(folder, "could not make a file: " + describe_error(errno) +
                       ". Name another directory, on a disk, or make room in that one.");
  }
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
  struct stat found {};
  if (stat(folder.c_str(), &found) != 0) {
    refuse(folder, "cannot be found: " + describe_error(errno) +
                       ". Make the directory, or name another one.");
  }
  if (!S_ISDIR(found.st_mode)) refuse(folder, "is no directory. Name one, on a disk.");
  if (access(folder.c_str(), W_OK | X_OK) != 0) {
    refuse(folder, "cannot be written to: " + describe_error(errno) +
                       ". Change its permissions, or name another directory.");
  }
  if (is_memory(folder)) {
    refuse(folder, "lies in memory (a tmpfs), so nothing would be saved. Name a directory on a disk.");
  }
  const int file = make_file(folder, FileCalls{});
  const char byte = 0;
  const bool holds_bytes = pwrite(file, &byte, 1, 0) == 1 || errno == ENOSPC || errno == EDQUOT;
  const int error = errno;
  close(file);
  if (!holds_bytes) {
    refuse(folder, "could not write to a file: " + describe_error(error) +
                       ". Name another directory, on a disk.");
  }
}

ScratchFile::ScratchFile(const std::string& folder, bool direct, const FileCalls& calls)
    : calls_(calls) {
  check_scratch_folder(folder);
  file_ = make_file(folder, calls_);
  direct_ = direct && can_be_direct();
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
  if (!is_direct()) return nbytes;
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
    } else if (more < nbytes - done && is_direct()) {
      more = more / kBlock * kBlock;  // whatever follows must be aligned too
    }
    done += std::min(more, nbytes - done);
    tries = more > 0 ? 0 : tries + 1;
    if (tries > kTries) return found < 0 ? errno : at_end;
  }
  return 0;
}

int ScratchFile::write(const char* from, std::size_t nbytes, std::size_t offset, Bounce& bounce) {
  if (is_direct()) return write_all(from, nbytes, offset, bounce);
  // See Note [The page cache is no saved memory]
  const std::lock_guard guard(through_cache_);
  const int error = write_all(from, nbytes, offset, bounce);
  return error == 0 ? flush(offset, nbytes) : error;
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
  const auto count = static_cast<off_t>(TierAccount::rounded(nbytes));
  if (!is_direct()) posix_fadvise(file_, static_cast<off_t>(offset), count, POSIX_FADV_DONTNEED);
  return error;
}

// See Note [The page cache is no saved memory]
int ScratchFile::flush(std::size_t offset, std::size_t nbytes) {
  const auto begin = static_cast<off_t>(offset);
  const auto count = static_cast<off_t>(TierAccount::rounded(nbytes));
  constexpr unsigned kAll =
      SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  // Only now does the system look for room, perhaps. Some file systems cannot be asked about a range, and
  // some about nothing.
  const auto failed = [] { return errno == ENOSPC || errno == EDQUOT || errno == EIO; };
  if (calls_.sync(file_, begin, count, kAll) != 0) {
    if (failed() || (fdatasync(file_) != 0 && failed())) return errno;
  }
  posix_fadvise(file_, begin, count, POSIX_FADV_DONTNEED);
  return 0;
}

}  // namespace rematfn
