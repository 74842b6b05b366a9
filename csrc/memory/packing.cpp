// SPDX-License-Identifier: Apache-2.0
#include "memory/packing.h"

#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <numeric>

namespace rematfn {
namespace {

constexpr std::size_t kBlockBytes = std::size_t{16} << 10;
constexpr std::size_t kPieces = 16;
constexpr std::size_t kSamples = 6;
constexpr std::size_t kSample = 512;  // bytes
constexpr std::size_t kGroup = 64;     // elements of which a mask is one word

template <class T>
T load(const char* from, std::size_t i = 0) {
  T value;
  std::memcpy(&value, from + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void store(char* to, std::size_t i, T value) {
  std::memcpy(to + i * sizeof(T), &value, sizeof(T));
}

// ---- eight bytes at once -------------------------------------------------------------------------------

constexpr std::uint64_t kOnes = 0x0101010101010101;

// A one in each byte that is not zero.
constexpr std::uint64_t set_bytes(std::uint64_t word) {
  constexpr std::uint64_t kLow = 0x7f * kOnes;
  return (((word & kLow) + kLow) | word) >> 7 & kOnes;
}

// ---- what an element can be narrowed to ----------------------------------------------------------------

template <class T>
struct Same {
  using Element = T;
  using Narrow = T;
  static constexpr bool fits(T) { return true; }
  static constexpr T narrow(T x) { return x; }
  static constexpr T widen(T x) { return x; }
};

// A float that was a bfloat16.
struct Upper {
  using Element = std::uint32_t;
  using Narrow = std::uint16_t;
  static constexpr bool fits(Element x) { return (x & 0xffffU) == 0; }
  static constexpr Narrow narrow(Element x) { return static_cast<Narrow>(x >> 16); }
  static constexpr Element widen(Narrow x) { return Element{x} << 16; }
};

// A float that was a half.
struct Half {
  using Element = std::uint32_t;
  using Narrow = std::uint16_t;
  static bool fits(Element x) { return widen(narrow(x)) == x; }
  static Narrow narrow(Element x) { return c10::detail::fp16_ieee_from_fp32_value(std::bit_cast<float>(x)); }
  static Element widen(Narrow x) { return c10::detail::fp16_ieee_to_fp32_bits(x); }
};

// A double that was a float.
struct Float {
  using Element = std::uint64_t;
  using Narrow = float;
  static bool fits(Element x) { return widen(narrow(x)) == x; }
  static Narrow narrow(Element x) { return static_cast<float>(std::bit_cast<double>(x)); }
  static Element widen(Narrow x) { return std::bit_cast<Element>(static_cast<double>(x)); }
};

template <class E, class N>
struct Integer {
  using Element = E;
  using Narrow = N;
  static constexpr bool fits(E x) { return widen(narrow(x)) == x; }
  static constexpr N narrow(E x) { return static_cast<N>(x); }
  static constexpr E widen(N x) { return static_cast<E>(x); }  // with its sign
};

}  // namespace

// ---- a block -------------------------------------------------------------------------------------------

struct ElementCodec {
  using Block = Packing::Block;
  Block (*encode)(const char* from, std::size_t nbytes, char* to);
  void (*decode)(const Block& block, const char* from, char* to, std::size_t nbytes);
};

template <class Narrowing>
struct CodecOf {
  using E = typename Narrowing::Element;
  using N = typename Narrowing::Narrow;
  using Form = Packing::Form;
  using Block = Packing::Block;

  static Block made(std::size_t nbytes, Form form) { return {static_cast<std::uint16_t>(nbytes), form}; }

  static Block encode(const char* from, std::size_t nbytes, char* to) {
    const std::size_t n = nbytes / sizeof(E);
    const std::size_t masks = n / 8;
    if (n > 0 && nbytes % (kGroup * sizeof(E)) == 0) {
      const E one = load<E>(from);
      std::size_t first = 1;
      while (first < n && load<E>(from, first) == one) ++first;
      if (first == n) {
        store(to, 0, one);
        return made(sizeof(E), Form::kOne);
      }
      const E two = load<E>(from, first);
      if (2 * sizeof(E) + masks < nbytes && are_of(from, first / kGroup * kGroup, n, one, two)) {
        store(to, 0, one);
        store(to, 1, two);
        for (std::size_t i = 0; i < n; i += kGroup) {
          store(to + 2 * sizeof(E), i / kGroup, mask_of(from + i * sizeof(E), two));
        }
        return made(2 * sizeof(E) + masks, Form::kTwo);
      }
      // Masked, to see how long that is.
      char* const rest = to + masks;
      std::size_t filled = 0;
      bool fit = true;
      for (std::size_t i = 0; fit && i < n; i += kGroup) {
        std::uint64_t mask = 0;
        for (std::size_t k = 0; k < kGroup; ++k) {
          const E x = load<E>(from, i + k);
          store(rest, filled, Narrowing::narrow(x));  // overwritten by the next if it is zero
          fit &= Narrowing::fits(x);
          mask |= std::uint64_t{x != 0} << k;
          filled += x != 0;
        }
        store(to, i / kGroup, mask);
      }
      const std::size_t narrow = n * sizeof(N);
      const std::size_t masked = masks + filled * sizeof(N);
      if (fit && masked < std::min(narrow, nbytes)) return made(masked, Form::kMasked);
      if (fit && narrow < nbytes) {
        for (std::size_t i = 0; i < n; ++i) store(to, i, Narrowing::narrow(load<E>(from, i)));
        return made(narrow, Form::kNarrow);
      }
    }
    std::memcpy(to, from, nbytes);
    return made(nbytes, Form::kRaw);
  }

  // Which of a group are `x`.
  static std::uint64_t mask_of(const char* from, E x) {
    std::uint64_t mask = 0;
    if constexpr (sizeof(E) == 1) {  // eight at once
      constexpr std::uint64_t kGather = 0x0102040810204080;
      for (std::size_t k = 0; k < kGroup; k += 8) {
        const std::uint64_t differ = set_bytes(load<std::uint64_t>(from + k) ^ kOnes * x);
        mask |= ((differ ^ kOnes) * kGather >> 56) << k;
      }
    } else {
      for (std::size_t k = 0; k < kGroup; ++k) mask |= std::uint64_t{load<E>(from, k) == x} << k;
    }
    return mask;
  }

  static bool are_of(const char* from, std::size_t begin, std::size_t end, E one, E two) {
    for (std::size_t i = begin; i < end; i += kGroup) {
      bool all = true;
      for (std::size_t k = 0; k < kGroup; ++k) {
        const E x = load<E>(from, i + k);
        all &= (x == one) | (x == two);
      }
      if (!all) return false;
    }
    return true;
  }

  // What lies behind `from` may be read, as far as one element goes.
  static void decode(const Block& block, const char* from, char* to, std::size_t nbytes) {
    const std::size_t n = nbytes / sizeof(E);
    switch (block.form) {
      case Form::kRaw:
        std::memcpy(to, from, nbytes);
        return;
      case Form::kOne:
        for (std::size_t i = 0; i < n; ++i) store(to, i, load<E>(from));
        return;
      case Form::kTwo: {
        const E one = load<E>(from);
        const E two = load<E>(from, 1);
        for (std::size_t i = 0; i < n; i += kGroup) {
          const auto mask = load<std::uint64_t>(from + 2 * sizeof(E), i / kGroup);
          if constexpr (sizeof(E) == 1) {
            for (std::size_t k = 0; k < kGroup; k += 8) {
              const std::uint64_t is_two = set_bytes((mask >> k & 0xff) * kOnes & 0x8040201008040201);
              store(to + i + k, 0, kOnes * one ^ is_two * static_cast<E>(one ^ two));
            }
          } else {
            for (std::size_t k = 0; k < kGroup; ++k) store(to, i + k, (mask >> k & 1) != 0 ? two : one);
          }
        }
        return;
      }
      case Form::kNarrow:
        for (std::size_t i = 0; i < n; ++i) store(to, i, Narrowing::widen(load<N>(from, i)));
        return;
      case Form::kMasked: {
        const char* const rest = from + n / 8;
        std::size_t done = 0;
        for (std::size_t i = 0; i < n; i += kGroup) {
          const auto mask = load<std::uint64_t>(from, i / kGroup);
          for (std::size_t k = 0; k < kGroup; ++k) {
            const std::uint64_t filled = mask >> k & 1;  // without a branch, which half of them would miss
            store(to, i + k, static_cast<E>(Narrowing::widen(load<N>(rest, done)) & (E{0} - E(filled))));
            done += filled;
          }
        }
      }
    }
  }

  static constexpr ElementCodec codec{&encode, &decode};
};

namespace {

template <class... Narrowings>
constexpr std::array kCodecsOf{&CodecOf<Narrowings>::codec...};
constexpr auto kCodecs =
    kCodecsOf<Same<std::uint8_t>, Same<std::uint16_t>, Same<std::uint32_t>, Same<std::uint64_t>, Upper, Half, Float,
              Integer<std::uint16_t, std::int8_t>, Integer<std::uint32_t, std::int8_t>,
              Integer<std::uint32_t, std::int16_t>, Integer<std::uint64_t, std::int8_t>,
              Integer<std::uint64_t, std::int16_t>, Integer<std::uint64_t, std::int32_t>>;

// A block as it is packed, or tried to be; one element more may be written or read.
using Buffer = std::array<char, kBlockBytes + kBlockBytes / 8 + sizeof(std::uint64_t)>;

}  // namespace

Encoding Encoding::find(const char* bytes, std::size_t nbytes) {
  Encoding best{kCodecs.front()};
  const bool is_short = nbytes < kSamples * kSample;
  const std::size_t samples = is_short ? 1 : kSamples;
  const std::size_t sample = is_short ? nbytes : kSample;
  const std::size_t step = is_short ? 0 : (nbytes - kSample) / (kSamples - 1) & ~(sizeof(std::uint64_t) - 1);
  Buffer buffer;
  for (const ElementCodec* codec : kCodecs) {
    std::size_t sum = 0;
    for (std::size_t i = 0; i < samples; ++i) {
      sum += codec->encode(bytes + i * step, sample, buffer.data()).nbytes;
    }
    const double share = static_cast<double>(sum) / static_cast<double>(samples * sample);
    if (share < best.share) best = {codec, share};
  }
  return best;
}

// ---- a value -------------------------------------------------------------------------------------------

// See Note [Packed where it lies]
Packing::Packing(const Encoding& encoding, char* bytes, std::size_t nbytes, InPieces run)
    : codec_(encoding.codec), nbytes_(nbytes), blocks_((nbytes + kBlockBytes - 1) / kBlockBytes) {
  const std::size_t in_a_piece = blocks_in_a_piece();
  const std::size_t pieces = (blocks_.size() + in_a_piece - 1) / in_a_piece;
  std::vector<std::size_t> packed(pieces);
  run(pieces, [&](std::size_t piece) {
    const std::size_t first = piece * in_a_piece;
    const std::size_t end = std::min(first + in_a_piece, blocks_.size());
    char* to = bytes + first * kBlockBytes;
    Buffer buffer;
    for (std::size_t b = first; b < end; ++b) {
      const std::size_t at = b * kBlockBytes;
      blocks_[b] = codec_->encode(bytes + at, std::min(kBlockBytes, nbytes - at), buffer.data());
      std::memcpy(to, buffer.data(), blocks_[b].nbytes);
      to += blocks_[b].nbytes;
    }
    packed[piece] = static_cast<std::size_t>(to - (bytes + first * kBlockBytes));
  });
  for (std::size_t piece = 0; piece < pieces; ++piece) {
    std::memmove(bytes + packed_bytes_, bytes + piece * in_a_piece * kBlockBytes, packed[piece]);
    packed_bytes_ += packed[piece];
  }
}

void Packing::unpack(const char* packed, char* bytes, InPieces run) const {
  const std::size_t in_a_piece = blocks_in_a_piece() * kBlockBytes;
  run((nbytes_ + in_a_piece - 1) / in_a_piece, [&](std::size_t piece) {
    const std::size_t begin = piece * in_a_piece;
    unpack(packed, begin, std::min(in_a_piece, nbytes_ - begin), bytes + begin);
  });
}

void Packing::unpack(const char* packed, std::size_t begin, std::size_t count, char* to) const {
  std::size_t b = begin / kBlockBytes;
  const auto add = [](std::size_t sum, const Block& block) { return sum + block.nbytes; };
  const auto first = blocks_.begin() + static_cast<std::ptrdiff_t>(b);
  const char* from = packed + std::accumulate(blocks_.begin(), first, std::size_t{0}, add);
  Buffer buffer;
  std::array<char, kBlockBytes> whole;
  for (const std::size_t end = begin + count; begin < end; ++b) {
    const std::size_t at = b * kBlockBytes;
    const std::size_t nbytes = std::min(kBlockBytes, nbytes_ - at);
    const std::size_t part = std::min(at + nbytes, end) - begin;
    std::memcpy(buffer.data(), from, blocks_[b].nbytes);
    codec_->decode(blocks_[b], buffer.data(), part == nbytes ? to : whole.data(), nbytes);
    if (part < nbytes) std::memcpy(to, whole.data() + (begin - at), part);
    from += blocks_[b].nbytes;
    to += part;
    begin += part;
  }
}

std::size_t Packing::blocks_in_a_piece() const {
  return std::max<std::size_t>((blocks_.size() + kPieces - 1) / kPieces, 1);
}

}  // namespace rematfn
