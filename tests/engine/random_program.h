// SPDX-License-Identifier: Apache-2.0
//
// random_program.h: programs of sizes at random, and what must hold after each event of a run.

#pragma once

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <c10/util/Exception.h>

#include "engine/domain.h"
#include "model.h"
#include "planning/simulation.h"

namespace rematfn {

// Of an engine whose values may move.
Tests moving_tests();

// A quarter of so many; `make test-exhaustive` takes all.
inline unsigned some(unsigned count) {
  return std::getenv("REMATFN_EXHAUSTIVE") != nullptr ? count : count / 4;
}

struct Sizes final : Store {};

class Dice {
 public:
  explicit Dice(std::mt19937& random) : random_(random) {}
  std::size_t below(std::size_t n) { return random_() % n; }
  bool one_in(std::size_t n) { return below(n) == 0; }
  template <class T>
  T& among(std::vector<T>& all) {
    return all[below(all.size())];
  }
  // Takes it out.
  template <class T>
  T draw(std::vector<T>& all) {
    std::swap(among(all), all.back());
    T drawn = std::move(all.back());
    all.pop_back();
    return drawn;
  }

 private:
  std::mt19937& random_;
};

// Reads, writes, drops, marks, results that leave, uninitialised memory, operators that cannot be
// replayed, bytes beside them. Half of them end by asking for all that the program still has.
inline Trace random_program(std::mt19937& random) {
  Dice dice(random);
  Trace trace;
  std::vector<Trace::Id> alive;
  std::vector<Trace::Id> outside;
  std::vector<Trace::Id> raw;
  const auto bytes = [&] { return std::size_t{1} << dice.below(8); };
  for (std::size_t i = 0, n = 1 + dice.below(3); i < n; ++i) {
    outside.push_back(trace.add_value(bytes(), false));
  }
  const std::size_t calls = 5 + dice.below(40);
  for (std::size_t c = 0; c < calls; ++c) {
    CallFacts facts;
    facts.cost = 1e-6 * static_cast<double>(1 + dice.below(100));
    facts.scratch_bytes = dice.one_in(4) ? bytes() : 0;
    facts.replayable = !dice.one_in(12);
    facts.raw = dice.one_in(16);
    facts.backward = c > calls / 2;
    Trace::Call call(dice.one_in(4) ? "aten::mm" : "random", facts);
    for (std::size_t i = 0, n = dice.below(4); i < n; ++i) {
      const bool ours = !alive.empty() && !dice.one_in(5);
      call.reads.push_back({dice.among(ours ? alive : outside)});
    }
    // Writes go to one value that is read once, and has not left.
    std::int32_t over = -1;
    for (std::size_t i = 0; i < call.reads.size() && over < 0; ++i) {
      const Trace::Id value = call.reads[i].value;
      const auto times = std::count_if(call.reads.begin(), call.reads.end(),
                                       [&](const Trace::Read& r) { return r.value == value; });
      const bool ours = std::find(alive.begin(), alive.end(), value) != alive.end();
      if (ours && times == 1 && dice.one_in(8)) over = static_cast<std::int32_t>(i);
    }
    std::vector<Trace::Id> made;
    if (over >= 0) {
      Trace::Read& read = call.reads[static_cast<std::size_t>(over)];
      read.written = true;
      made.push_back(trace.add_value(trace.values[read.value].nbytes, true));
      call.makes.push_back({made.back(), over});
      std::erase(alive, read.value);
      std::erase(raw, read.value);
    }
    for (std::size_t i = 0, n = over >= 0 ? dice.below(2) : 1 + dice.below(2); i < n; ++i) {
      made.push_back(trace.add_value(bytes(), true));
      call.output_bytes += trace.values[made.back()].nbytes;
      call.makes.push_back({made.back()});
      if (facts.raw) raw.push_back(made.back());
    }
    trace.add_call(std::move(call));
    alive.insert(alive.end(), made.begin(), made.end());
    if (dice.one_in(20)) trace.add_unrecorded(dice.below(64));
    if (dice.one_in(6) && !alive.empty()) {
      trace.add_mark(dice.among(alive), dice.one_in(2) ? "a" : "");
    }
    if (dice.one_in(3) && !raw.empty()) trace.add(Trace::What::kFilled, dice.draw(raw));
    if (dice.one_in(8) && !alive.empty()) trace.add(Trace::What::kRead, dice.among(alive));
    while (!alive.empty() && dice.one_in(3)) {
      const Trace::Id value = dice.draw(alive);
      std::erase(raw, value);
      if (dice.one_in(8)) {
        trace.add(Trace::What::kSeal, value);
        outside.push_back(value);
      } else {
        trace.add(Trace::What::kRelease, value);
      }
    }
  }
  while (random() % 2 == 0 && !alive.empty()) trace.add(Trace::What::kSeal, dice.draw(alive));
  trace.check();
  return trace;
}

// A level inside the outermost, around these calls of the program.
struct InnerLevel {
  std::size_t first_call = 0;
  std::size_t last_call = 0;  // still inside
  std::size_t budget = kNoBudget;
  std::vector<Way*> ways{};  // none: dropping
};

struct RunOptions : SimulationOptions {
  std::vector<Way*> ways{};  // of the outermost level; none: dropping, or `link`
  bool leaves_early = false;  // so does it
  std::optional<InnerLevel> inner{};
  bool check = true;  // the tables, after each event
};

// What an inner level did, beside its operators, which count already.
inline void add(Statistics& sum, const Statistics& inner) {
  sum.evictions += inner.evictions;
  sum.replays += inner.replays;
  sum.replayed_cost += inner.replayed_cost;
  sum.moves += inner.moves;
  sum.returns += inner.returns;
  sum.turned_back += inner.turned_back;
  sum.moved_bytes += inner.moved_bytes;
  sum.returned_bytes += inner.returned_bytes;
}

// The statistics of such a run. After each event `watch` sees the outermost level.
inline Statistics simulate(const Trace& trace, RunOptions options, Deeds* deeds = nullptr,
                           const std::function<void(const Table&)>& watch = {}) {
  const auto is_call = [&](std::size_t event, std::size_t call) {
    return trace.events[event].what == Trace::What::kCall && trace.events[event].index == call;
  };
  std::size_t next = 0;  // event
  options.between = [&](Table& outermost, Ref<Table>& innermost) {
    if (next == 0) {
      if (!options.ways.empty()) outermost.evict_by(options.ways);
      outermost.leaves_early = options.leaves_early;
    } else {
      if (options.inner && is_call(next - 1, options.inner->last_call)) {
        // What the level has made is the outermost's from now on.
        while (innermost->oldest != nullptr) outermost.domain->give(*innermost->oldest, outermost);
        add(outermost.statistics, innermost->statistics);
        innermost = Ref<Table>(&outermost);
      }
      if (options.check) {
        outermost.check();
        innermost->check();
      }
      if (watch) watch(outermost);
    }
    if (options.inner && next < trace.events.size() && is_call(next, options.inner->first_call)) {
      innermost = Ref<Table>(
          new Table(outermost.domain, outermost.ledger, &outermost, options.inner->budget, options.policy));
      if (!options.inner->ways.empty()) innermost->evict_by(options.inner->ways);
    }
    ++next;
  };
  return simulate(trace, static_cast<const SimulationOptions&>(options), deeds);
}

// Follows a run by its trace, and looks at the versions themselves after each event: what tables count
// is not believed. All that is said here of bytes is added up here.
class Audit {
 public:
  Audit(const Trace& trace, const RunOptions& options)
      : trace_(trace), options_(options), inside_(trace.values.size()) {}

  void after_event(const Table& outermost) {
    const Trace::Event& event = trace_.events[next_++];
    follow(event);
    Sum sum;
    add(outermost, sum);
    if (event.what == Trace::What::kRelease) return;  // buried as the lock is let go of
    expect(sum.held_values == values_, "the program has its values" + at());
    expect(sum.held_bytes == bytes_, "and their bytes" + at());
    dead_bytes_ = std::max(dead_bytes_, sum.bytes - std::min(sum.bytes, bytes_));
    most_bytes_ = std::max(most_bytes_, sum.bytes + unrecorded_);
  }

  void after_run(const Statistics& found) const {
    expect(next_ == trace_.events.size(), "every event is seen");
    expect(most_bytes_ <= found.peak_bytes, "the peak is the most that there ever was");
    expect(need_ <= found.min_budget, "no operator needs more than it says");
    expect(need_ <= options_.budget, "an operator runs only if it fits");
    expect(unconstrained_ == found.unconstrained_bytes, "what would be held is counted");
    const bool only_theirs = !evicts() && dead_bytes_ == 0;
    expect(!only_theirs || found.peak_bytes == unconstrained_, "and nothing else");
  }

  // Whether something may have to go.
  [[nodiscard]] bool evicts() const {
    const bool inner_is_bounded = options_.inner && options_.inner->budget != kNoBudget;
    return options_.budget != kNoBudget || inner_is_bounded || options_.policy.evict_everything;
  }

 private:
  struct Sum {
    std::size_t bytes = 0;
    std::size_t held_bytes = 0;
    std::size_t held_values = 0;
  };

  std::string at() const { return ", event " + std::to_string(next_); }

  void follow(const Trace::Event& event) {
    switch (event.what) {
      case Trace::What::kCall:
        return follow(trace_.calls[event.index]);
      case Trace::What::kRelease:
      case Trace::What::kSeal:
        return lose(event.index);
      case Trace::What::kUnrecorded:
        unrecorded_ = trace_.unrecorded[event.index];
        break;
      case Trace::What::kFilled:
      case Trace::What::kAddressed:
      case Trace::What::kRead:
      case Trace::What::kMark:
        break;
    }
    unconstrained_ = std::max(unconstrained_, bytes_ + unrecorded_);
  }

  void follow(const Trace::Call& call) {
    std::size_t needed = call.output_bytes + call.scratch_bytes;
    unconstrained_ = std::max(unconstrained_, bytes_ + unrecorded_ + needed);
    for (auto read = call.reads.begin(); read != call.reads.end(); ++read) {
      const bool first = std::none_of(call.reads.begin(), read, [&](const Trace::Read& other) {
        return other.value == read->value;
      });
      if (first && inside_[read->value]) needed += trace_.values[read->value].nbytes;
    }
    need_ = std::max(need_, needed);
    for (const Trace::Made& made : call.makes) {
      if (made.over >= 0) lose(call.reads[static_cast<std::size_t>(made.over)].value);
      inside_[made.value] = true;
      ++values_;
      bytes_ += trace_.values[made.value].nbytes;
    }
  }

  void lose(Trace::Id value) {
    if (!inside_[value]) return;
    inside_[value] = false;
    --values_;
    bytes_ -= trace_.values[value].nbytes;
  }

  void add(const Table& table, Sum& sum) const {
    Sum own;
    for (const Version* v = table.oldest; v != nullptr; v = v->next) {
      if (v->place() != Place::kAway) own.bytes += v->nbytes;
      if (v->has_tensor) own.held_bytes += v->nbytes;
      own.held_values += v->has_tensor;
      expect(evicts() || !v->has_tensor || v->place() == Place::kHere, "all is here without a budget");
      if (v->place() != Place::kAway || v->copied_by() != nullptr) continue;
      expect(static_cast<bool>(v->producer), "what is gone can be had again" + at());
      for (const Input& input : v->producer->inputs) {
        const bool is_listed = static_cast<bool>(input.version->table);
        expect(is_listed || input.version->place() == Place::kHere, "from what there is" + at());
      }
    }
    for (const Table* inner : table.inner) add(*inner, own);
    const std::size_t beside = table.enclosing ? 0 : unrecorded_;
    expect(table.budget == kNoBudget || own.bytes + beside <= table.budget,
           "every level keeps to its budget" + at());
    expect(table.statistics.peak_bytes <= table.budget, "within an operator too" + at());
    sum.bytes += own.bytes;
    sum.held_bytes += own.held_bytes;
    sum.held_values += own.held_values;
  }

  const Trace& trace_;
  const RunOptions& options_;
  std::vector<bool> inside_;  // by value: the program has it, and it has not left
  std::size_t values_ = 0;    // of these
  std::size_t bytes_ = 0;
  std::size_t unrecorded_ = 0;
  std::size_t next_ = 0;  // event
  std::size_t need_ = 0;  // the most that a call reads and allocates
  std::size_t unconstrained_ = 0;  // snapshots left out
  std::size_t dead_bytes_ = 0;     // that the program has not asked for
  std::size_t most_bytes_ = 0;
};

// Null if it does not fit.
inline std::unique_ptr<Statistics> run(const Trace& trace, const RunOptions& options) {
  Audit audit(trace, options);
  const auto watch = [&](const Table& outermost) { audit.after_event(outermost); };
  try {
    auto found = std::make_unique<Statistics>(simulate(trace, options, nullptr, watch));
    audit.after_run(*found);
    return found;
  } catch (const NoRoom& why) {
    const std::size_t within = options.inner ? options.inner->budget : kNoBudget;
    expect(audit.evicts(), "without a budget all fits");
    expect(why.thrashing || why.smallest_budget > std::min(options.budget, within),
           "what does not fit is more than what there is");
    return nullptr;
  } catch (const c10::Error&) {  // a copy is lost
    return nullptr;
  }
}

}  // namespace rematfn
