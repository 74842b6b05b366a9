// SPDX-License-Identifier: Apache-2.0
#include "levels/pressure.h"

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <limits>
#include <string>

namespace rematfn {
namespace {

constexpr std::size_t kNothingPretended = std::numeric_limits<std::size_t>::max();
std::atomic<std::size_t> pretended{kNothingPretended};

constexpr std::size_t kAskEvery = std::size_t{32} << 20;
constexpr std::size_t kKeepFree = std::size_t{512} << 20;

std::optional<std::size_t> number_in(const char* path) {
  std::ifstream file(path);
  std::size_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // no such file, or "max"
}

std::optional<std::size_t> system_memory_left() {
  std::ifstream file("/proc/meminfo");
  std::string name;
  std::string unit;
  std::size_t kilobytes = 0;
  while (file >> name >> kilobytes) {
    std::getline(file, unit);
    if (name == "MemAvailable:") return kilobytes * 1024;
  }
  return std::nullopt;
}

std::optional<std::size_t> group_memory_left(const char* limit_path, const char* usage_path) {
  const auto limit = number_in(limit_path);
  const auto usage = number_in(usage_path);
  if (!limit || !usage) return std::nullopt;
  return *limit > *usage ? *limit - *usage : 0;
}

}  // namespace

std::size_t memory_left() {
  if (const std::size_t told = pretended; told != kNothingPretended) return told;
  std::size_t left = std::numeric_limits<std::size_t>::max();
  const auto consider = [&](std::optional<std::size_t> bytes) {
    if (bytes) left = std::min(left, *bytes);
  };
  consider(system_memory_left());
  consider(group_memory_left("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"));
  consider(group_memory_left("/sys/fs/cgroup/memory/memory.limit_in_bytes",
                             "/sys/fs/cgroup/memory/memory.usage_in_bytes"));
  return left;
}

void pretend_memory_left(std::optional<std::size_t> nbytes) {
  pretended = nbytes.value_or(kNothingPretended);
}

// See Note [Passive levels]
void relieve_pressure(Level& level, std::size_t nbytes) {
  level.made_since_asked += nbytes;
  if (level.made_since_asked < kAskEvery) return;
  level.made_since_asked = 0;
  const std::size_t left = memory_left();
  if (left >= kKeepFree) return;
  if (level.domain->evict_bytes(level, kKeepFree - left) > 0) malloc_trim(0);
}

}  // namespace rematfn
