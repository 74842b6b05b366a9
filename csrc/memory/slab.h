// SPDX-License-Identifier: Apache-2.0
//
// slab.h: one long piece of storage, a file or memory, divided by us. Knows offsets only.

#pragma once

#include <atomic>
#include <cstddef>
#include <optional>

#include "memory/stretches.h"

namespace rematfn {

// What is asked for goes into the smallest hole that holds it, as low as possible; else at the end,
// which moves out as far as the capacity. Neighbouring holes are one. Everything is rounded up to the
// alignment. Not thread-safe.
class Slab {
 public:
  static constexpr std::size_t kAlignment = 4096;

  explicit Slab(std::size_t capacity) { set_capacity(capacity); }

  // The bytes that so many take.
  [[nodiscard]] static std::size_t rounded(std::size_t nbytes);
  // An offset; nothing if there is no room. Zero bytes are one unit.
  [[nodiscard]] std::optional<std::size_t> allocate(std::size_t nbytes);
  // What allocate() gave for as many.
  void free(std::size_t offset, std::size_t nbytes);
  // From now on; what is held beyond it stays, and a hole at the end is there no more as far as it lies
  // beyond.
  void set_capacity(std::size_t capacity);

  // The most bytes that allocate() has room for. Any thread.
  [[nodiscard]] std::size_t largest() const { return largest_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::size_t capacity() const { return capacity_; }
  [[nodiscard]] std::size_t held() const { return held_; }

 private:
  [[nodiscard]] std::size_t hole_at_end() const;  // its bytes
  void find_largest();

  std::size_t capacity_ = 0;
  std::size_t held_ = 0;
  std::size_t extent_ = 0;  // what lies beyond has never been used
  Stretches holes_;
  std::atomic<std::size_t> largest_{0};
};

}  // namespace rematfn
