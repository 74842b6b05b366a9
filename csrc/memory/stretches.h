// SPDX-License-Identifier: Apache-2.0
//
// stretches.h: what is free of a line of addresses or offsets. Neighbours are one.
//
// They stand in one list and are looked through: of memory that a step of a network has freed there
// are some dozens (62 at most in the networks of benchmarks/resident.py), and a tree takes longer.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace rematfn {

// Only add() needs memory: without any it throws, and nothing has changed.
class Stretches {
 public:
  struct Stretch {
    std::size_t begin;
    std::size_t nbytes;
    std::uint64_t freed;  // when; of neighbours, the latest
  };

  void add(std::size_t begin, std::size_t nbytes);
  // So many bytes of the smallest that holds them, the lowest of those, from its front: where they begin.
  [[nodiscard]] std::optional<std::size_t> take(std::size_t nbytes);
  // From the front of the one that was freed first; at most so many bytes. There is one.
  [[nodiscard]] Stretch take_oldest(std::size_t nbytes);
  // Of the last one, if it reaches up to `end`, what lies beyond `from`: where it ends now.
  [[nodiscard]] std::size_t cut_off(std::size_t end, std::size_t from);

  [[nodiscard]] std::size_t nbytes() const { return nbytes_; }
  // Where it begins, and its bytes; the lowest of those.
  [[nodiscard]] std::pair<std::size_t, std::size_t> largest() const;

 private:
  using At = std::vector<Stretch>::iterator;

  Stretch take_front(At at, std::size_t nbytes);

  std::vector<Stretch> all_;
  std::uint64_t now_ = 0;
  std::size_t nbytes_ = 0;
};

}  // namespace rematfn
