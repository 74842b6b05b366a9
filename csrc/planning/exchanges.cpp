// SPDX-License-Identifier: Apache-2.0
#include "planning/exchanges.h"

#include <algorithm>
#include <utility>

namespace rematfn {

void Exchanges::prepare(bool only_replayed) {
  maker_.assign(live_.size(), kNone);
  for (std::uint32_t node = 0; node < nodes_.size(); ++node) {
    for (const Id value : nodes_[node].makes) maker_[value] = node;
  }
  room_.assign(nodes_.size(), budget_);
  may_go_.assign(nodes_.size(), only_replayed ? 0 : 1);
  next_.resize(live_.size());
  begin();
  for (std::size_t i = items_.size(); i-- > 0;) {
    std::size_t& room = room_[items_[i].node];
    room = std::max(room, step_over(items_[i]));
    if (items_[i].is_replay) may_go_[items_[i].node] = 1;
  }
}

// The last item that has no room, with what is live before it; nothing if all have.
std::optional<std::size_t> Exchanges::last_overflow() {
  begin();
  std::size_t i = items_.size();
  bool fits = true;
  while (fits && i > 0) {
    const Item& item = items_[--i];
    fits = step_over(item) <= room_[item.node];
    for (const Id value : nodes_[item.node].reads) next_[value] = i;
  }
  note_steps(items_.size() - i);
  return fits ? std::nullopt : std::optional(i);
}

// What may go while `running` runs, and be made again at a cost of `most`: what costs the least for the bytes that
// it takes, times a number from one to four, by chance. Bytes are those without the inputs that have to stay instead.
std::optional<Trace::Id> Exchanges::other_than(std::uint32_t node, const Node& running, double most, bool by_size) {
  constexpr double kChance = 3;
  constexpr std::size_t kSteps = 1024;
  std::optional<Id> found;
  double least = 0;
  for (Id value = 0; value < live_.size(); ++value) {
    if (!live_[value] || !has_producer_[value] || trace_.values[value].nbytes == 0) continue;
    const std::uint32_t maker = maker_[value];
    const double cost = nodes_[maker].cost;
    if (maker == node || may_go_[maker] == 0 || cost > most) continue;
    if (std::ranges::find(running.reads, value) != running.reads.end()) continue;
    const auto nbytes = static_cast<double>(trace_.values[value].nbytes);
    double freed = nbytes;
    for (const Id read : nodes_[maker].reads) {
      if (!live_[read]) freed -= static_cast<double>(trace_.values[read].nbytes);
    }
    constexpr double kNothing = 1e-3;  // of its bytes
    if (by_size) freed = nbytes;
    const double by_chance = 1 + kChance * static_cast<double>(below(kSteps)) / kSteps;
    const double price = by_chance * cost / std::max(freed, kNothing * nbytes);
    if (found && price >= least) continue;
    found = value;
    least = price;
  }
  return found;
}

// False if there are none, or they cost too much.
bool Exchanges::exchange_for_others(std::size_t index) {
  constexpr double kMostCost = 10;  // of the replay's: sweeps spare some of the others
  constexpr int kMostOthers = 24;
  const std::uint32_t node = items_[index].node;
  const bool by_size = below(4) == 0;
  double most = kMostCost * nodes_[node].cost;
  items_.erase(items_.begin() + static_cast<std::ptrdiff_t>(index));
  for (int others = 0; others < kMostOthers; ++others) {
    is_valid_ = true;
    const std::optional<std::size_t> full = last_overflow();
    if (!std::exchange(is_valid_, true)) return false;
    if (!full) return true;
    const std::optional<Id> other = other_than(node, nodes_[items_[*full].node], most, by_size);
    if (!other) return false;
    most -= nodes_[maker_[*other]].cost;
    const auto reader = static_cast<std::ptrdiff_t>(next_[*other]);
    items_.insert(items_.begin() + reader, {maker_[*other], true});
  }
  return false;
}

void Exchanges::exchange(const ExchangeLimits& limits) {
  random_.seed(limits.seed);
  prepare(limits.only_replayed || !trace_.marks.empty());
  std::vector<Item> best = items_;
  double least = cost();
  const std::uint64_t end = effort_.operators + limits.operators;
  while (effort_.operators < end) {
    std::vector<std::size_t> replays;
    for (std::size_t i = 0; i < items_.size(); ++i) {
      if (items_[i].is_replay) replays.push_back(i);
    }
    if (replays.empty()) break;
    note_steps(items_.size());
    const bool fits = exchange_for_others(replays[below(replays.size())]);
    if (fits) {
      drop_useless();
      while (sweep(0)) {
      }
    }
    const double found = cost();
    if (fits && found <= least) {
      least = found;
      best = items_;
    }
    items_ = best;
  }
}

}  // namespace rematfn
