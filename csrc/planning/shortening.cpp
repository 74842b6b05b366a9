// SPDX-License-Identifier: Apache-2.0
#include "planning/shortening.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <random>
#include <utility>

namespace rematfn {
namespace {

// A run as a sequence of the program's operators and of replays, and what is in memory at each. A pass goes from
// the end to the beginning.
class Sequence {
 public:
  // The run, without what it does not need as it is.
  Sequence(const Trace& trace, std::size_t budget, const std::vector<Replayed>& replays, Effort& effort)
      : trace_(trace), budget_(budget), effort_(effort) {
    const std::size_t values = trace.values.size();
    has_producer_.resize(values);
    live_.resize(values);
    names_.resize(values);
    std::generate(names_.begin(), names_.end(), std::mt19937_64{});
    read_events();
    auto replay = replays.begin();
    for (std::uint32_t e = 0; e < trace_.events.size(); ++e) {
      for (; replay != replays.end() && replay->event == e; ++replay) {
        items_.push_back({node_of_call_[replay->call], true});
      }
      if (node_of_event_[e] != kNone) items_.push_back({node_of_event_[e], false});
    }
    for (const std::uint32_t node : at_the_end_) items_.push_back({node, false});
    drop_useless();
  }

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

  std::shared_ptr<const Schedule> schedule() {
    std::vector<std::vector<Id>> spent(items_.size());
    begin();
    for (std::size_t i = items_.size(); i-- > 0;) {
      const Node& node = nodes_[items_[i].node];
      if (node.is_call) {
        for (const auto* values : {&node.makes, &node.reads}) {
          std::ranges::copy_if(*values, std::back_inserter(spent[i]),
                               [&](Id value) { return !live_[value] && has_producer_[value]; });
        }
      }
      step_over(items_[i]);
    }
    auto schedule = std::make_shared<Schedule>();
    for (std::size_t i = 0; i < items_.size(); ++i) {
      const Item& item = items_[i];
      if (!nodes_[item.node].is_call) continue;
      Groups& after = item.is_replay ? schedule->spent_after_replay : schedule->spent_after_call;
      for (const Id value : spent[i]) after.add(value);
      after.end_group();
      const auto call = std::ranges::lower_bound(node_of_call_, item.node) - node_of_call_.begin();
      if (item.is_replay) {
        schedule->replays.add(static_cast<std::uint32_t>(call));
      } else {
        schedule->replays.end_group();
      }
    }
    schedule->replays.end_group();
    return schedule;
  }

 private:
  using Id = Trace::Id;
  using Flags = std::vector<char>;  // as bits they took a third of a sweep
  static constexpr std::uint32_t kNone = static_cast<std::uint32_t>(-1);

  // A call of the program, or another event that reads a value.
  struct Node {
    double cost = 0;
    std::size_t allocated = 0;  // beside what is live, for the while
    std::size_t copied = 0;     // by a replay alone: of what came from outside, and is written
    bool is_call = false;
    std::vector<Id> reads{};     // counted values, each once
    std::vector<Id> makes{};
    std::vector<Id> replaced{};  // of the reads: what is overwritten
  };

  struct Item {
    std::uint32_t node;
    bool is_replay;
  };

  // ---- the record -----------------------------------------------------------------------------------

  void add_call(std::uint32_t index, std::size_t unrecorded, const std::vector<bool>& sealed) {
    const Trace::Call& call = trace_.calls[index];
    Node node{.cost = call.cost,
              .allocated = call.output_bytes + call.scratch_bytes + unrecorded,
              .is_call = true};
    bool writes = false;
    bool loses = false;
    for (const auto& [value, written] : call.reads) {
      const bool counts = trace_.values[value].counted && !sealed[value];
      writes |= written;
      loses |= written && !has_producer_[value];
      if (written && !counts) node.copied += trace_.values[value].nbytes;
      if (counts && std::ranges::find(node.reads, value) == node.reads.end()) node.reads.push_back(value);
    }
    const bool makes_fresh = std::ranges::any_of(call.makes, [](const Trace::Made& m) { return m.over < 0; });
    const bool is_recorded = call.replayable && (makes_fresh || (writes && !loses));
    for (const auto& [value, over] : call.makes) {
      node.makes.push_back(value);
      const Id old = over < 0 ? value : call.reads[static_cast<std::size_t>(over)].value;
      has_producer_[value] = is_recorded && (over < 0 || has_producer_[old]);
      if (over >= 0) node.replaced.push_back(old);
    }
    node_of_call_[index] = static_cast<std::uint32_t>(nodes_.size());
    nodes_.push_back(std::move(node));
  }

  void read_events() {
    const std::size_t values = trace_.values.size();
    std::vector<bool> sealed(values, false);
    std::vector<bool> is_held(values, false);  // by its bytes alone, until the program drops it
    std::vector<bool> replaced(values, false);
    std::size_t unrecorded = 0;
    node_of_call_.resize(trace_.calls.size());
    node_of_event_.assign(trace_.events.size(), kNone);
    const auto add_reader = [&](Id value) {
      nodes_.push_back({.allocated = unrecorded, .reads = {value}});
      return static_cast<std::uint32_t>(nodes_.size() - 1);
    };
    for (std::size_t e = 0; e < trace_.events.size(); ++e) {
      const auto [what, index] = trace_.events[e];
      if (what == Trace::What::kCall) {
        add_call(index, unrecorded, sealed);
        node_of_event_[e] = node_of_call_[index];
        for (const Id value : nodes_.back().makes) is_held[value] = !has_producer_[value];
        for (const Id value : nodes_.back().replaced) replaced[value] = true;
        continue;
      }
      if (what == Trace::What::kMark) continue;
      if (what == Trace::What::kUnrecorded) {
        unrecorded = trace_.unrecorded[index];
        continue;
      }
      if (!trace_.values[index].counted || sealed[index] || replaced[index]) continue;
      if (what == Trace::What::kRelease && !is_held[index]) continue;
      node_of_event_[e] = add_reader(index);
      if (what == Trace::What::kRead) continue;
      is_held[index] = what == Trace::What::kFilled || what == Trace::What::kAddressed;
      sealed[index] = what == Trace::What::kSeal;
    }
    for (Id value = 0; value < values; ++value) {
      if (is_held[value] && !replaced[value]) at_the_end_.push_back(add_reader(value));
    }
  }

  // ---- what is live, from the end to the beginning --------------------------------------------------

  void set(Id value, bool is_live) {
    if (live_[value] == static_cast<char>(is_live)) return;
    live_[value] = static_cast<char>(is_live);
    const std::size_t nbytes = trace_.values[value].nbytes;
    state_ ^= names_[value];
    bytes_ += is_live ? nbytes : -nbytes;
    if (logs_) log_.push_back(value);
  }
  void undo() {
    logs_ = false;
    for (; !log_.empty(); log_.pop_back()) set(log_.back(), live_[log_.back()] == 0);
  }
  void begin() {
    std::fill(live_.begin(), live_.end(), false);
    bytes_ = state_ = 0;
  }

  // The bytes in memory while it runs; zero if it is a replay that makes nothing live.
  std::size_t step_over(const Item& item) {
    const Node& node = nodes_[item.node];
    std::size_t copied = 0;
    if (item.is_replay) {
      const auto is_made = [&](Id v) { return live_[v] && has_producer_[v]; };
      if (std::ranges::none_of(node.makes, is_made)) return 0;
      // See Note [A replay writes to copies]
      copied = node.copied;
      for (const Id value : node.replaced) {
        if (trace_.values[value].counted && live_[value]) copied += trace_.values[value].nbytes;
      }
    } else {
      for (const Id value : node.replaced) is_valid_ &= !trace_.values[value].counted || !live_[value];
    }
    for (const Id value : node.makes) {
      if (!item.is_replay || has_producer_[value]) set(value, false);
    }
    for (const Id value : node.reads) set(value, true);
    return std::max<std::size_t>(bytes_ + node.allocated + copied, 1);
  }

  void drop_useless() {
    begin();
    std::vector<Item> kept;
    for (std::size_t i = items_.size(); i-- > 0;) {
      if (step_over(items_[i]) > 0 || !items_[i].is_replay) kept.push_back(items_[i]);
    }
    std::ranges::reverse(kept);
    items_ = std::move(kept);
  }

  // The seconds of its replays.
  [[nodiscard]] double cost() const {
    double sum = 0;
    for (const Item& item : items_) sum += item.is_replay ? nodes_[item.node].cost : 0;
    return sum;
  }

  void note_steps(std::uint64_t steps) {
    constexpr std::uint64_t kStepsOfOne = 16;  // take as long as one simulated operator
    if (effort_.stop.load(std::memory_order_relaxed)) throw Stopped{};
    steps_ += steps;
    effort_.operators.fetch_add(steps_ / kStepsOfOne, std::memory_order_relaxed);
    steps_ %= kStepsOfOne;
  }

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

  const Trace& trace_;
  const std::size_t budget_;
  Effort& effort_;
  std::uint64_t steps_ = 0;  // not yet counted
  std::vector<Node> nodes_;
  Flags has_producer_;
  std::vector<std::uint32_t> node_of_call_;
  std::vector<std::uint32_t> node_of_event_;
  std::vector<std::uint32_t> at_the_end_;
  std::vector<Item> items_;

  Flags live_;
  std::vector<std::uint64_t> names_;
  std::uint64_t state_ = 0;  // of what is live: the names together
  std::size_t bytes_ = 0;
  bool is_valid_ = true;  // no value is read that was overwritten
  bool logs_ = false;
  std::vector<Id> log_;

  // Of exchanges.
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
  Sequence sequence(trace, budget, replays, effort);
  sequence.shorten();
  if (exchanges.operators > 0) sequence.exchange(exchanges);
  return sequence.schedule();
}

}  // namespace rematfn
