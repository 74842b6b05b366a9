// SPDX-License-Identifier: Apache-2.0
//
// packing.h: the same bytes in fewer, exactly, in the memory where they lie.
//
// Note [Packed where it lies]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Whoever packs a value does so for want of room. There is none for a second, shorter copy beside it. So a
// value is packed in its own memory, from the front: each block through a buffer of its thread, to where
// the block before ended. No block becomes longer, so what is overwritten has been read. What lies behind
// the last one is then cut off (Pages::shrink). To unpack takes room for the value beside its packed bytes;
// both count then.
//
// The encodings are exact: what comes back is compared with nothing, since each block is encoded only by
// what all of its elements fit. Which they are, bytes alone tell: a storage has no type. A sample says how
// wide an element is and what it can be narrowed to; each block then takes the shortest of
//   - one element, if all are equal;
//   - a bit for each element, if they have two values: truth values, a dropout's noise;
//   - elements narrowed: a float that was a bfloat16 or a half, a double that was a float, an integer
//     that fits in fewer bits;
//   - a bit for each, and those that are not zero, perhaps narrowed: what a ReLU or a dropout returns;
//   - its bytes as they are.
// Zero is a pattern of bits: a negative zero is not.

#pragma once

#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace rematfn {

// Runs `piece` for each of so many, perhaps on several threads at once.
using InPieces = c10::function_ref<void(std::size_t pieces, c10::function_ref<void(std::size_t)> piece)>;

struct ElementCodec;

// How the elements of a value are encoded.
struct Encoding {
  const ElementCodec* codec;
  double share = 1;  // of its bytes that packing leaves, as far as a sample tells

  // The best of those there are. What is too short for a sample is all looked at.
  [[nodiscard]] static Encoding find(const char* bytes, std::size_t nbytes);
};

// The bytes of one value, packed.
class Packing {
 public:
  // Packs them where they lie; the first packed_bytes() of them are what unpack() needs.
  Packing(const Encoding& encoding, char* bytes, std::size_t nbytes, InPieces run);

  [[nodiscard]] std::size_t packed_bytes() const { return packed_bytes_; }
  // Of this object.
  [[nodiscard]] std::size_t index_bytes() const { return blocks_.size() * sizeof(Block); }
  void unpack(const char* packed, char* bytes, InPieces run) const;
  // Some of the bytes.
  void unpack(const char* packed, std::size_t begin, std::size_t count, char* to) const;

 private:
  enum class Form : std::uint8_t { kRaw, kOne, kTwo, kNarrow, kMasked };
  struct Block {
    std::uint16_t nbytes;
    Form form;
  };
  friend struct ElementCodec;
  template <class Narrowing>
  friend struct CodecOf;

  [[nodiscard]] std::size_t blocks_in_a_piece() const;

  const ElementCodec* const codec_;
  const std::size_t nbytes_;
  std::size_t packed_bytes_ = 0;
  std::vector<Block> blocks_;
};

}  // namespace rematfn
