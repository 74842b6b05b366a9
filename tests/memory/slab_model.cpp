// SPDX-License-Identifier: Apache-2.0
//
// The slab beside a naive one, without torch.
#include "memory/slab.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <vector>

#include "model.h"

using rematfn::expect, rematfn::Slab;

namespace {

constexpr std::size_t kPage = Slab::kAlignment;

// By units, one at a time.
struct NaiveSlab {
  std::vector<bool> used;
  std::size_t capacity;
  std::size_t held = 0;

  [[nodiscard]] std::optional<std::size_t> place(std::size_t n) const {
    if (held + n > capacity) return std::nullopt;
    std::optional<std::size_t> best;
    std::size_t best_size = SIZE_MAX;
    std::size_t i = 0;
    while (i < used.size()) {
      std::size_t end = i;
      while (end < used.size() && !used[end]) ++end;
      if (end - i >= n && end - i < best_size) best = i, best_size = end - i;
      i = std::max(end, i + 1);
    }
    if (best) return best;
    std::size_t at = used.size();
    while (at > 0 && !used[at - 1]) --at;
    return at + n <= capacity ? std::optional(at) : std::nullopt;
  }
  void mark(std::size_t at, std::size_t n, bool to) {
    used.resize(std::max(used.size(), at + n));
    std::fill_n(used.begin() + at, n, to);
    to ? held += n : held -= n;
  }
};

void slab() {
  for (unsigned seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    const std::size_t capacity = 1 + random() % 200;
    Slab slab(capacity * kPage + random() % kPage);
    NaiveSlab naive{{}, capacity};
    std::map<std::size_t, std::size_t> blocks;  // bytes by offset
    for (int i = 0; i < 400; ++i) {
      if (blocks.empty() || random() % 5 < 3) {
        const std::size_t nbytes = random() % (random() % 4 == 0 ? 60 * kPage : 3 * kPage);
        const std::size_t units = Slab::rounded(nbytes) / kPage;
        const auto wanted = naive.place(units);
        expect((units * kPage <= slab.largest()) == wanted.has_value(), "largest() tells");
        const auto found = slab.allocate(nbytes);
        expect(found.has_value() == wanted.has_value(), "there is room where there is");
        if (!found) continue;
        expect(*found == *wanted * kPage, "the best hole is taken");
        naive.mark(*wanted, units, true);
        blocks.emplace(*found, nbytes);
      } else {
        const auto block = std::next(blocks.begin(), random() % blocks.size());
        slab.free(block->first, block->second);
        naive.mark(block->first / kPage, Slab::rounded(block->second) / kPage, false);
        blocks.erase(block);
      }
      if (random() % 50 == 0) {
        naive.capacity = 1 + random() % 200;
        slab.set_capacity(naive.capacity * kPage);
        while (naive.used.size() > naive.capacity && !naive.used.back()) naive.used.pop_back();
      }
      expect(slab.held() == naive.held * kPage, "held bytes are counted");
    }
    for (const auto& [offset, nbytes] : blocks) slab.free(offset, nbytes);
    expect(slab.held() == 0 && slab.largest() == slab.capacity(), "all can be had again");
  }
  Slab huge(std::size_t{1} << 50);
  expect(!huge.allocate(SIZE_MAX) && !huge.allocate(SIZE_MAX - 5), "no sum overflows");
}

}  // namespace

int main() { slab(); }
