// SPDX-License-Identifier: Apache-2.0
//
// memory.h: device memory, and the pinned memory of the host.
//
// Both keep what is freed for the next request of that size, as torch's caching allocators do. What
// is handed out is full of NaNs; what is free cannot be touched: a kernel that is late ends the process,
// with a message.
//
// Note [Memory is freed in stream order]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A tensor dies on the host while kernels that read it are still waiting in a queue. A block of device
// memory belongs to the stream that was current when it was allocated: what that stream does is in
// order, so the block can be handed out again at once, on that stream. It is closed, and opened again,
// by jobs of that stream. Other streams nobody knows of, unless record_stream told: then the block
// waits until each of them has come to the point at which it was freed. Pinned memory belongs to no
// stream. While a stream is captured, its blocks are the graph's, which opens and closes them each time that it
// is replayed; what is freed later stays open. Other blocks are closed at once: a graph that reads one ends the
// process.

#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "stream.h"

namespace fake {

struct Block {
  char* data;
  std::size_t mapped;                   // whole pages
  std::size_t nbytes;                   // what was asked for
  std::optional<c10::StreamId> stream;  // none: it is the host's
  int pool;                             // a graph's own; 0: none's
  std::set<c10::StreamId> used_on;      // beside `stream`
  bool is_open;
};

class Memory {
 public:
  // Bytes in use now and at most; `held` counts what waits for streams too.
  struct Counts {
    c10::CachingAllocator::Stat asked;
    c10::CachingAllocator::Stat in_use;  // rounded up
    c10::CachingAllocator::Stat held;
    c10::CachingAllocator::Stat mapped;
    std::int64_t failures = 0;
  };

  Block* allocate(std::size_t nbytes, std::optional<c10::StreamId> stream);
  void free(Block* block);
  void note_use(const void* data, c10::StreamId stream);
  // As torch's allocator of pinned memory: it knows a block by what it gave out, or by its first byte.
  bool note_use_of_block(const void* data, const void* context, c10::StreamId stream);
  [[nodiscard]] bool owns(const void* data);
  // Of the kind that can be asked for in a signal handler.
  [[nodiscard]] bool may_own(const void* data);

  [[nodiscard]] Counts counts();
  void forget_peak();
  void give_back_free();
  void limit_to(std::size_t nbytes);
  [[nodiscard]] std::size_t limit();

 private:
  using Kind = std::tuple<c10::StreamId, std::size_t, int>;
  static std::size_t rounded(std::size_t nbytes);
  static Kind kind_of(const Block& block) { return {block.stream.value_or(-1), block.mapped, block.pool}; }
  Block* find(const void* data);
  Block* map(std::size_t mapped, std::optional<c10::StreamId> stream, int pool);
  void retire(Block* block);

  std::mutex mutex_;
  std::map<const char*, Block*> blocks_;
  std::map<Kind, std::vector<Block*>> free_;
  Counts counts_;
  std::size_t limit_ = std::size_t{8} << 30;
};

// Who is to know of each block of device memory that is given back.
using TellFreed = void (*)(const void* data, std::size_t nbytes);

[[nodiscard]] Memory& device_memory();
[[nodiscard]] Memory& pinned_memory();

// `record_stream`. Accelerators pass over bytes that are not their allocator's; here it is an error.
void record_use(const c10::DataPtr& bytes, c10::Stream stream);

}  // namespace fake
