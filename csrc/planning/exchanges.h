// SPDX-License-Identifier: Apache-2.0
//
// exchanges.h: replays of a sequence are exchanged for cheaper ones.
//
// Note [A replay is exchanged for cheaper ones]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Where no replay can be left out alone, one can be if others come in its place: what it made is kept, and where
// that has no room, values go that are not read there, and are replayed before their next readers; so may their
// inputs, in turn. Then whatever has become needless is left out, and the sequence is taken if it costs no more.
// This is an iterated local search (Lourenço et al., 2003) of chains of ejections (Glover, 1996), by chance.
// Where values are marked, or the policy keeps some, only what the run has replayed goes: it went by that.
// docs/design/floor.md has what exchanges bring.

#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "planning/sequence.h"

namespace rematfn {

// How long exchanges are tried, in operators simulated in that time; and what their chances depend on.
struct ExchangeLimits {
  std::uint64_t operators = 0;
  std::uint32_t seed = 0;
  bool only_replayed = false;  // only what the run has made again may go: the policy keeps what it may
};

class Exchanges final : public Sequence {
 public:
  using Sequence::Sequence;

  // Tries some, within `limits`.
  void exchange(const ExchangeLimits& limits);

 private:
  void prepare(bool only_replayed);
  bool exchange_for_others(std::size_t index);
  [[nodiscard]] std::optional<std::size_t> last_overflow();
  [[nodiscard]] std::optional<Id> other_than(std::uint32_t node, const Node& running, double most, bool by_size);
  [[nodiscard]] std::size_t below(std::size_t n) { return random_() % n; }

  std::mt19937 random_;
  std::vector<std::uint32_t> maker_;  // node, by value
  Flags may_go_;                      // by node: what it makes
  std::vector<std::size_t> room_;     // bytes, by node: the budget, or what it has had
  std::vector<std::size_t> next_;     // the item that reads a value next, as far as a pass has come
};

}  // namespace rematfn
