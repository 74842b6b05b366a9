// SPDX-License-Identifier: Apache-2.0
//
// system_pages.h: what the system is asked about memory: addresses, and the pages that lie there.
//
// All sizes are in whole pages.

#pragma once

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <string>

namespace rematfn {

inline const auto kPage = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));

inline std::size_t whole_pages(std::size_t nbytes) { return (nbytes + kPage - 1) & ~(kPage - 1); }

inline std::size_t bytes_of_memory() {
  return static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * kPage;
}

// Whether addresses count in a limit of the process. It may be set at any time.
inline bool addresses_are_limited() {
  for (auto which : {RLIMIT_AS, RLIMIT_DATA}) {
    rlimit limit{};
    if (getrlimit(which, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) return true;
  }
  return false;
}

// Whether addresses that nobody uses cost something: they are limited, or the system promises no memory
// that it may not have.
inline bool addresses_are_dear() {
  if (addresses_are_limited()) return true;
  int overcommit = 0;
  return std::ifstream("/proc/sys/vm/overcommit_memory") >> overcommit && overcommit == 2;
}

// New addresses, or these, without pages. Null if the system gives none; these may not be mapped any more.
inline void* map_pages(std::size_t nbytes, void* here = nullptr) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (here != nullptr ? MAP_FIXED : 0);
  void* begin = mmap(here, nbytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  return begin == MAP_FAILED ? nullptr : begin;
}

// Neither a fault nor the system's thread that joins pages makes more resident than is asked for.
inline void want_small_pages(void* begin, std::size_t nbytes) {
  madvise(begin, nbytes, MADV_NOHUGEPAGE);
}

// Whether these addresses are mapped, where nothing is resident then.
inline bool drop_pages(void* begin, std::size_t nbytes) {
  return madvise(begin, nbytes, MADV_DONTNEED) == 0 || errno != ENOMEM;
}

// The system has them all at once for less than one by one, as they are touched. Whether it can: Linux
// can since 5.14.
inline bool populate_pages(void* begin, std::size_t nbytes) {
  constexpr int kPopulateWrite = 23;  // which older headers lack
  return madvise(begin, nbytes, kPopulateWrite) == 0;
}

// Bytes of a huge page; 0 if the system gives none just where they are asked for, or only larger ones,
// as it does where its small ones are larger: to hold a part of one would cost too much.
inline std::size_t huge_page() {
  constexpr std::size_t kMost = std::size_t{4} << 20;
  static const std::size_t nbytes = [] {
    const std::string folder = "/sys/kernel/mm/transparent_hugepage/";
    std::string enabled;
    std::getline(std::ifstream(folder + "enabled"), enabled);
    std::size_t found = 0;
    std::ifstream(folder + "hpage_pmd_size") >> found;
    if (enabled.find("[never]") != std::string::npos || found <= kPage || found > kMost) return std::size_t{0};
    void* const page = map_pages(kPage);
    const bool populates = page != nullptr && populate_pages(page, kPage);
    if (page != nullptr) munmap(page, kPage);
    return populates ? found : 0;
  }();
  return nbytes;
}

// How far it is to the next place where a huge page may begin; 0 if this is one, or there are none.
inline std::size_t ahead_of_huge_page(const void* address) {
  const std::size_t over = huge_page() == 0 ? 0 : reinterpret_cast<std::uintptr_t>(address) % huge_page();
  return over == 0 ? 0 : huge_page() - over;
}

// Of these bytes, those that huge pages would hold.
inline std::size_t bytes_in_huge_pages(const void* begin, std::size_t nbytes) {
  const std::size_t ahead = ahead_of_huge_page(begin);
  return huge_page() == 0 || nbytes < ahead ? 0 : (nbytes - ahead) / huge_page() * huge_page();
}

// The same as populate_pages(), with huge pages where all of one is among these.
inline bool populate_with_huge_pages(void* begin, std::size_t nbytes) {
  const std::size_t whole = bytes_in_huge_pages(begin, nbytes);
  void* const first = static_cast<char*>(begin) + ahead_of_huge_page(begin);
  if (whole > 0) madvise(first, whole, MADV_HUGEPAGE);
  const bool done = populate_pages(begin, nbytes);
  if (whole > 0) want_small_pages(first, whole);
  return done;
}

// The pages at `from` lie at `to` then, in place of what was there; none are at `from`, whose addresses
// stay mapped. If it returns false `to` may not be mapped any more.
inline bool move_pages(void* from, void* to, std::size_t nbytes) {
  constexpr int kDontUnmap = 4;  // MREMAP_DONTUNMAP, which older headers lack
  return mremap(from, nbytes, nbytes, MREMAP_MAYMOVE | MREMAP_FIXED | kDontUnmap, to) != MAP_FAILED;
}

}  // namespace rematfn
