// SPDX-License-Identifier: Apache-2.0
//
// pool.h: the memory of records that each operator makes anew, kept for the next one.
//
// Note [Records are filled in place]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// `records.push_back({a, b, c})` writes a record's small fields to the stack and reads them back in
// large pieces, for which a processor has to wait until the writes are through. For what is done
// with each operator that is worth avoiding: the new record is made first and filled where it lies.

#pragma once

#include <cstddef>
#include <new>

#include "base/thread_local.h"

namespace rematfn {

// Objects of T, a final class, take the place of those that died before them on the same thread. A
// thread keeps no more than some thousand blocks; the rest goes back to where it came from.
template <class T>
class Pooled {
 public:
  static void* operator new(std::size_t size) {
    Blocks& blocks = blocks_;
    Block* block = blocks.first;
    if (block == nullptr) return ::operator new(size);
    blocks.first = block->next;
    __builtin_prefetch(blocks.first, /*rw=*/1);
    --blocks.kept;
    return block;
  }

  static void operator delete(void* memory) {
    Blocks& blocks = blocks_;
    if (blocks.kept >= kMostKept) [[unlikely]] return ::operator delete(memory);
    if (blocks.kept == 0) [[unlikely]] end_with_thread();
    blocks.first = new (memory) Block{blocks.first};
    ++blocks.kept;
  }

 private:
  struct Block {
    Block* next;
  };
  struct Blocks {
    Block* first;
    std::size_t kept;
  };
  struct End {
    ~End() {
      while (Block* block = blocks_.first) {
        blocks_.first = block->next;
        ::operator delete(block);
      }
      blocks_.kept = kMostKept;  // whatever the thread still frees is not kept
    }
  };
  // Apart from the blocks, for then these are found without asking whether they have been made.
  static void end_with_thread() { thread_local End end; }

  REMATFN_THREAD_LOCAL static inline Blocks blocks_{nullptr, 0};

#ifdef __SANITIZE_ADDRESS__
  static constexpr std::size_t kMostKept = 0;  // it wants to see each object come and go
#else
  static constexpr std::size_t kMostKept = 4096;
#endif
};

}  // namespace rematfn
