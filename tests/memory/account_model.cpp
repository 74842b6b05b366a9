// SPDX-License-Identifier: Apache-2.0
//
// The account of a tier beside a naive one, without torch.
#include "memory/tier_account.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <vector>

#include "model.h"

using rematfn::expect, rematfn::TierAccount;

namespace {

constexpr std::size_t kPage = TierAccount::kUnit;

// By units, one at a time.
struct NaiveAccount {
  std::vector<bool> used;
  std::size_t capacity = used.size();
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
    return best;
  }
  void mark(std::size_t at, std::size_t n, bool to) {
    std::fill_n(used.begin() + at, n, to);
    to ? held += n : held -= n;
  }
  void set_capacity(std::size_t n) {
    capacity = n;
    if (n > used.size()) used.resize(n);
    while (used.size() > n && !used.back()) used.pop_back();
  }
};

void account() {
  for (unsigned seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    const std::size_t capacity = 1 + random() % 200;
    TierAccount account(capacity * kPage + random() % kPage);
    NaiveAccount naive{std::vector<bool>(capacity)};
    std::map<std::size_t, std::size_t> blocks;  // bytes by offset
    for (int i = 0; i < 400; ++i) {
      if (blocks.empty() || random() % 5 < 3) {
        const std::size_t nbytes = random() % (random() % 4 == 0 ? 60 * kPage : 3 * kPage);
        const std::size_t units = TierAccount::rounded(nbytes) / kPage;
        const auto wanted = naive.place(units);
        expect(account.has_room(units * kPage) == wanted.has_value(), "has_room() tells");
        const auto found = account.take(nbytes);
        expect(found.has_value() == wanted.has_value(), "there is room where there is");
        if (!found) continue;
        expect(*found == *wanted * kPage, "the best hole is taken");
        naive.mark(*wanted, units, true);
        blocks.emplace(*found, nbytes);
      } else {
        const auto block = std::next(blocks.begin(), random() % blocks.size());
        account.give_back(block->first, block->second);
        naive.mark(block->first / kPage, TierAccount::rounded(block->second) / kPage, false);
        blocks.erase(block);
      }
      if (random() % 50 == 0) {
        if (random() % 2 == 0) {
          account.limit_to_held("it is full");
          if (naive.held < naive.capacity) naive.set_capacity(naive.held);
        } else {
          account.try_again();
          naive.set_capacity(capacity);
        }
      }
      expect(account.figures().held == naive.held * kPage, "held bytes are counted");
    }
    for (const auto& [offset, nbytes] : blocks) account.give_back(offset, nbytes);
    account.try_again();
    expect(account.figures().held == 0 && account.has_room(capacity * kPage), "all can be had again");
    account.limit(0, "it has failed");
    account.try_again();
    expect(!account.has_room(1), "or nothing any more");
  }
  TierAccount huge(std::size_t{1} << 50);
  expect(!huge.take(SIZE_MAX) && !huge.take(SIZE_MAX - 5), "no sum overflows");
}

}  // namespace

int main() { account(); }
