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
#include <memory>
#include <vector>

#include "engine/schedule.h"
#include "engine/trace.h"
#include "planning/simulation.h"

namespace rematfn {

class Sequence {
 public:
  using Id = Trace::Id;
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

  // The run, without what it does not need as it is.
  Sequence(const Trace& trace, std::size_t budget, const std::vector<Replayed>& replays, Effort& effort);

  // shortening.cpp. See Note [Replays that hindsight spares]
  void shorten();
  // Leaves out what saves at least `price` seconds for a byte in memory during a call. Whether anything was.
  bool sweep(double price);

  // The seconds of its replays.
  [[nodiscard]] double cost() const {
    double sum = 0;
    for (const Item& item : items_) sum += item.is_replay ? nodes_[item.node].cost : 0;
    return sum;
  }
  [[nodiscard]] std::shared_ptr<const Schedule> schedule();

 protected:
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
  std::size_t step_over(const Item& item);

  void drop_useless();
  void note_steps(std::uint64_t steps) {
    if (effort_.stop.load(std::memory_order_relaxed)) throw Stopped{};
    steps_ += steps;
    effort_.operators.fetch_add(steps_ / kStepsOfOne, std::memory_order_relaxed);
    steps_ %= kStepsOfOne;
  }

  const Trace& trace_;
  const std::size_t budget_;
  Effort& effort_;
  std::vector<Node> nodes_;
  using Flags = std::vector<char>;  // as bits they took a third of a sweep
  Flags has_producer_;
  std::vector<Item> items_;
  Flags live_;
  bool is_valid_ = true;  // no value is read that was overwritten

 private:
  static constexpr std::uint64_t kStepsOfOne = 16;  // take as long as one simulated operator

  void read_events();
  void add_call(std::uint32_t call, std::size_t unrecorded, const std::vector<bool>& sealed);

  std::vector<std::uint32_t> node_of_call_;
  std::vector<std::uint32_t> node_of_event_;
  std::vector<std::uint32_t> at_the_end_;
  std::vector<std::uint64_t> names_;
  std::uint64_t state_ = 0;  // of what is live: the names together
  std::size_t bytes_ = 0;
  bool logs_ = false;
  std::vector<Id> log_;
  std::uint64_t steps_ = 0;  // not yet counted
};

}  // namespace rematfn
