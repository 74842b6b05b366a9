// SPDX-License-Identifier: Apache-2.0
#include "planning/shortening.h"

#include <algorithm>
#include <optional>
#include <random>
#include <utility>

#include "planning/sequence.h"

namespace rematfn {
namespace {

class Shortening final : public Sequence {
 public:
  using Sequence::Sequence;

  // See Note [Replays that hindsight spares]
  void shorten() {
    constexpr double kFiner = 4;
    const auto calls = static_cast<double>(trace_.calls.size());
    const double all = trace_.cost() / static_cast<double>(budget_);  // saved by one call at that price
    for (double price = all; price * calls * calls > all; price /= kFiner) sweep(price);
    for (int i = 0; i < 4 && sweep(0); ++i) {}
  }

  // See Note [A replay is exchanged for cheaper ones]
  void exchange(const ExchangeLimits& limits) {
    random_.seed(limits.seed);
    prepare_to_exchange(limits.only_replayed || !trace_.marks.empty());
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
        while (sweep(0)) {}
      }
      const double found = cost();
      if (fits && found <= least) {
        least = found;
        best = items_;
      }
      items_ = best;
    }
  }

 private:
  // ---- what is not needed ---------------------------------------------------------------------------

  // Leaves out what saves at least `price` seconds for a byte in memory during a call. Whether anything was.
  bool sweep(double price) {
    constexpr double kHopeless = 4;  // more replays may be spared by it further on
    const std::size_t count = items_.size();
    std::vector<std::uint64_t> before(count + 1);  // what is live there, by its name
    std::vector<std::size_t> during(count);        // bytes; zero: it is left out, or useless
    std::vector<bool> left_out(count, false);
    begin();
    for (std::size_t i = count; i-- > 0;) {
      before[i + 1] = state_;
      during[i] = step_over(items_[i]);
    }
    before[0] = state_;
    begin();
    bool found = false;
    std::uint64_t looked_at = 0;
    for (std::size_t i = count; i-- > 0;) {
      if (left_out[i]) continue;
      if (items_[i].is_replay && during[i] > 0) {
        double saved = nodes_[items_[i].node].cost;
        double taken = 0;  // bytes times calls
        logs_ = is_valid_ = true;
        bool fits = true;
        std::size_t k = i;
        for (; fits && state_ != before[k]; ) {
          fits = k > 0;
          if (!fits || left_out[--k]) continue;
          ++looked_at;
          const std::size_t needed = step_over(items_[k]);
          const double cost = items_[k].is_replay ? nodes_[items_[k].node].cost : 0;
          if (needed == 0) {
            if (during[k] > 0) saved += cost;
          } else {
            if (during[k] == 0) saved -= cost;
            if (needed > during[k] && during[k] > 0) taken += static_cast<double>(needed - during[k]);
            fits = is_valid_ && needed <= std::max(budget_, during[k]) && price * taken < kHopeless * saved;
          }
        }
        undo();
        is_valid_ = true;
        if (fits && saved > 0 && saved >= price * taken) {
          found = left_out[i] = true;
          logs_ = true;
          before[i] = state_;
          for (std::size_t j = i; j-- > k;) {
            if (!left_out[j]) during[j] = step_over(items_[j]);
            before[j] = state_;
          }
          undo();
          continue;
        }
      }
      step_over(items_[i]);
    }
    note_steps(looked_at + 2 * count);
    std::vector<Item> rest;
    for (std::size_t i = 0; i < count; ++i) {
      if (!left_out[i]) rest.push_back(items_[i]);
    }
    items_ = std::move(rest);
    drop_useless();
    return found;
  }

  // ---- exchanges ------------------------------------------------------------------------------------

  void prepare_to_exchange(bool only_replayed) {
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
  std::optional<std::size_t> last_overflow() {
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
  std::optional<Id> other_than(std::uint32_t node, const Node& running, double most, bool by_size) {
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
  bool exchange_for_others(std::size_t index) {
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

  [[nodiscard]] std::size_t below(std::size_t n) { return random_() % n; }

  std::mt19937 random_;
  std::vector<std::uint32_t> maker_;  // node, by value
  Flags may_go_;                      // by node: what it makes
  std::vector<std::size_t> room_;     // bytes, by node: the budget, or what it has had
  std::vector<std::size_t> next_;     // the item that reads a value next, as far as a pass has come
};

}  // namespace

std::shared_ptr<const Schedule> shortened(const Trace& trace, std::size_t budget,
                                          const std::vector<Replayed>& replays, Effort& effort,
                                          const ExchangeLimits& exchanges) {
  Shortening run(trace, budget, replays, effort);
  run.shorten();
  if (exchanges.operators > 0) run.exchange(exchanges);
  return run.schedule();
}

}  // namespace rematfn
