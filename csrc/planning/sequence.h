// SPDX-License-Identifier: Apache-2.0
//
// sequence.h: a run as a sequence of the program's operators and of replays, and what is in memory at each.
//
// Who reads a value reads what was made last; so from the sequence alone follows what has to be in memory when:
// from where it is made to its last reader before it is made again. A pass goes from the end to the beginning.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "engine/schedule.h"
#include "engine/trace.h"
#include "planning/simulation.h"

namespace rematfn {

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

 protected:
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
    steps_ += steps;
    effort_.note(steps_ / kStepsOfOne);
    steps_ %= kStepsOfOne;
  }

  const Trace& trace_;
  const std::size_t budget_;
  std::vector<Node> nodes_;
  std::vector<Item> items_;
  Effort& effort_;
  Flags has_producer_;
  Flags live_;
  std::uint64_t state_ = 0;  // of what is live: the names together
  bool is_valid_ = true;     // no value is read that was overwritten
  bool logs_ = false;        // what is set can be undone

 private:
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
      sealed[index] = Trace::leaves(what);
    }
    for (Id value = 0; value < values; ++value) {
      if (is_held[value] && !replaced[value]) at_the_end_.push_back(add_reader(value));
    }
  }

  std::vector<std::uint32_t> node_of_call_;
  std::vector<std::uint32_t> node_of_event_;
  std::vector<std::uint32_t> at_the_end_;
  std::vector<std::uint64_t> names_;
  std::size_t bytes_ = 0;
  std::vector<Id> log_;
  std::uint64_t steps_ = 0;  // not yet counted
};

}  // namespace rematfn
