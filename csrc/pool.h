// SPDX-License-Identifier: Apache-2.0
//
// pool.h: the memory of records that each operator makes anew, kept for the next one.

#pragma once

#include <cstddef>
#include <new>

namespace rematfn {

// Objects of T, a final class, take the place of those that died before them on the same thread. A
// thread keeps no more than some thousand blocks; the rest goes back to where it came from.
template <class T>
class Pooled {
 public:
  static void* operator new(std::size_t size) {
    Blocks& blocks = blocks_of_thread();
    Block* block = blocks.first;
    if (block == nullptr) return ::operator new(size);
    blocks.first = block->next;
    --blocks.kept;
    return block;
  }

  static void operator delete(void* memory) {
    Blocks& blocks = blocks_of_thread();
    if (blocks.kept >= kMostKept) return ::operator delete(memory);
    blocks.first = new (memory) Block{blocks.first};
    ++blocks.kept;
  }

 private:
  struct Block {
    Block* next;
  };
  struct Blocks {
    Block* first = nullptr;
    std::size_t kept = 0;
    ~Blocks() {
      while (Block* block = first) {
        first = block->next;
        ::operator delete(block);
      }
      kept = kMostKept;  // whatever the thread still lets go of is not kept
    }
  };
  static Blocks& blocks_of_thread() {
    thread_local Blocks blocks;
    return blocks;
  }

#ifdef __SANITIZE_ADDRESS__
  static constexpr std::size_t kMostKept = 0;  // it wants to see each object come and go
#else
  static constexpr std::size_t kMostKept = 4096;
#endif
};

}  // namespace rematfn
