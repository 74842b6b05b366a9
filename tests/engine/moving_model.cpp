// SPDX-License-Identifier: Apache-2.0
//
// The engine without tensors where values may move: a way that moves numbers, and plans over a link.
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/domain.h"
#include "engine/guide.h"
#include "move.h"
#include "planning/program.h"
#include "random_plan.h"

namespace rematfn {
namespace {

// ---- a way that moves -------------------------------------------------------------------------

// By a plan that would rather drop, in the least budget that can be held by moving: most fits, since what may
// move does. See Note [Near the floor], Rule 4.
void moves_where_replays_thrash(unsigned count) {
  unsigned refused = 0;
  Sizes sizes;
  Drop drop(sizes);
  for (unsigned seed = 0; seed < count; ++seed) {
    std::mt19937 random(seed);
    const auto trace = std::make_shared<const Trace>(random_program(random));
    const auto run_by = [&](std::size_t budget, bool drops) {
      Move move(std::size_t{1} << 30);
      RunOptions options;
      options.budget = budget;
      options.ways = drops ? std::vector<Way*>{&drop, &move} : std::vector<Way*>{&move};
      if (drops) options.guide = guide_of(trace, {.prefers = Preference::kDropping});
      return run(*trace, options);
    };
    std::size_t least = 1;
    while (run_by(least, /*drops=*/false) == nullptr) ++least;
    refused += run_by(least, /*drops=*/true) == nullptr;
  }
  expect(refused < count / 5, "most fits where what may move does: not " + std::to_string(refused));
}

// Copies that stay in the memory: their bytes count, the budget holds, and nearly all that runs by replays alone
// runs. Beside a link, so does nearly all that runs by the link alone, since they move on to it.
void packs(unsigned count) {
  unsigned moved = 0;
  unsigned fitted = 0;
  unsigned refused = 0;  // that run by replays alone
  unsigned fitted_beside = 0;
  unsigned refused_beside = 0;  // that run by the link alone
  std::uint64_t replays[2] = {0, 0};
  for (unsigned seed = 0; seed < count; ++seed) {
    std::mt19937 random(seed);
    const std::string where = "program " + std::to_string(seed) + ": ";
    Trace trace = random_program(random);
    for (Trace::Value& value : trace.values) value.packed_share = static_cast<float>(random() % 5) / 4;
    Dice dice(random);
    const RandomPlan plan(dice, trace);
    const std::size_t peak = run(trace, {})->peak_bytes;
    for (const double fraction : {0.7, 0.5, 0.4}) {
      RunOptions options{{.budget = static_cast<std::size_t>(fraction * static_cast<double>(peak))}};
      options.policy.evict_everything = seed % 5 == 0;
      const auto dropping = run(trace, options);
      if (seed % 3 == 0) options.guide = plan.guide();
      for (const bool drops : {true, false}) {
        options.link = LinkOptions{{.per_byte_out = 1e-9, .per_byte_in = 1e-9, .packs = true}, peak, drops};
        const auto found = run(trace, options);
        refused += drops && !found && dropping && !options.guide;
        if (!found) continue;
        ++fitted;
        moved += found->moves > 0;
        expect(found->peak_bytes <= options.budget, where + "the budget holds");
        expect(drops || options.guide || found->replays == 0, where + "what is packed is not replayed");
        if (!drops || !dropping) continue;
        replays[0] += found->replays;
        replays[1] += dropping->replays;
      }
    }
    for (const double fraction : {0.5, 0.4, 0.3, 0.2}) {
      RunOptions options{{.budget = static_cast<std::size_t>(fraction * static_cast<double>(peak))}};
      if (seed % 3 == 0) options.guide = plan.guide();
      for (const bool drops : {true, false}) {
        options.link = LinkOptions{{.per_byte_out = 1e-3, .per_byte_in = 1e-3}, peak, drops};
        const bool fits = run(trace, options) != nullptr;
        options.link->packing = LinkFigures{.per_byte_out = 1e-5, .per_byte_in = 1e-5, .packs = true};
        const auto found = run(trace, options);
        fitted_beside += found != nullptr;
        refused_beside += fits && !found;
        if (!found) continue;
        expect(found->peak_bytes <= options.budget, where + "the budget holds beside a link");
        expect(drops || options.guide || found->replays == 0, where + "what is moved on is not replayed");
      }
    }
  }
  expect(fitted > count && moved > count / 2, "values are packed");
  expect(100 * refused < fitted, "what runs by replays alone runs, but for one in a hundred");
  expect(100 * refused_beside < fitted_beside, "what runs by a link alone runs, but for one in a hundred");
  expect(replays[0] < replays[1], "and less is replayed");
}

// One level that moves, one that drops, one within the other, at every budget.
void moves(unsigned count) {
  unsigned fitted = 0;
  unsigned where_dropping_does_not = 0;
  std::size_t moves = 0;
  std::size_t returns = 0;
  std::size_t called_back = 0;
  std::size_t turned_back = 0;
  std::size_t late = 0;
  std::size_t lost = 0;
  std::uint64_t replays = 0;
  for (unsigned seed = 0; seed < count; ++seed) {
    std::mt19937 random(seed);
    const std::string where = "program " + std::to_string(seed) + ": ";
    const Trace trace = random_program(random);
    const auto free = run(trace, {});
    const auto calls = static_cast<std::size_t>(trace.calls.size());
    const std::size_t first = random() % calls;
    const std::size_t last = first + random() % (calls - first);
    const std::size_t room = std::size_t{1} << (random() % 12);
    Dice dice(random);
    const RandomPlan plan(dice, trace);
    Sizes sizes;
    Drop drop(sizes);
    for (const double fraction : {0.7, 0.4}) {
      const auto budget = static_cast<std::size_t>(fraction * static_cast<double>(free->peak_bytes));
      RunOptions dropping;
      dropping.budget = budget;
      const bool fits_by_dropping = run(trace, dropping) != nullptr;
      for (int nesting = 0; nesting < 4; ++nesting) {
        Move move(room, /*may_fail=*/seed % 7 == 0);
        RunOptions options;
        options.budget = budget;
        if (seed % 3 == 0) options.guide = plan.guide();
        options.leaves_early = seed % 4 == 0;
        options.policy.evict_everything = seed % 5 == 0;
        const std::size_t within = budget / (1 + random() % 2);
        switch (nesting) {
          case 0:
            options.ways = {&move};
            break;
          case 1:
            options.ways = {&move, &drop};
            break;
          case 2:  // drop outside, move inside
            options.inner = InnerLevel{first, last, within, {&move}};
            break;
          case 3:
            options.ways = {&move};
            options.inner = InnerLevel{first, last, within, {}};
            break;
        }
        const auto found = run(trace, options);
        expect(move.is_empty(), where + "no copy outlives the program");
        moves += move.moves;
        returns += move.returns;
        called_back += move.discards_under_way;
        turned_back += move.turned_back;
        lost += move.lost;
        if (found == nullptr) continue;
        ++fitted;
        replays += found->replays;
        where_dropping_does_not += !fits_by_dropping;
        expect(found->peak_bytes <= budget, where + "the budget holds");
        expect(found->operators == free->operators, where + "every operator runs");
        expect(found->unconstrained_bytes == free->unconstrained_bytes, where + "as much is held");
        expect(nesting != 0 || move.lost > 0 || found->replays == 0,
               where + "what moves is not replayed");
        expect(found->moves >= found->returns - found->turned_back, where + "what returns has gone");
        late += move.late;
      }
    }
  }
  expect(fitted > count && moves > count && returns > count && replays > count &&
             called_back > count && turned_back > 20 && late > count && lost > 100 &&
             where_dropping_does_not > 0,
         "moving is put to the test");
}

// The same program up to some event. There it drops some of its values, and reads the others.
Trace left_early(const Trace& record, Dice& dice) {
  Trace program = record;
  program.events.resize(1 + dice.below(record.events.size()));
  program.calls.clear();
  program.marks.clear();
  program.unrecorded.clear();
  std::vector<Trace::Id> alive;
  for (const Trace::Event& event : program.events) {
    switch (event.what) {
      case Trace::What::kCall:
        program.calls.push_back(record.calls[event.index]);
        for (const Trace::Read& read : program.calls.back().reads) {
          if (read.written) std::erase(alive, read.value);
        }
        for (const Trace::Made& made : program.calls.back().makes) alive.push_back(made.value);
        break;
      case Trace::What::kRelease:
      case Trace::What::kSeal:
        std::erase(alive, event.index);
        break;
      case Trace::What::kMark:
        program.marks.push_back(record.marks[event.index]);
        break;
      case Trace::What::kUnrecorded:
        program.unrecorded.push_back(record.unrecorded[event.index]);
        break;
      case Trace::What::kFilled:
      case Trace::What::kAddressed:
        break;
    }
  }
  for (std::size_t i = alive.size() / 2; i > 0; --i) program.add(Trace::What::kRelease, dice.draw(alive));
  while (!alive.empty()) {
    const Trace::Id value = dice.draw(alive);
    Trace::Call call("another", {.cost = 1e-6});
    call.reads = {{value}};
    program.add_call(std::move(call));
    program.add(Trace::What::kRelease, value);
  }
  program.check();
  return program;
}

// What was on its way for a reader that does not come may be what others are to be replayed from.
void programs_that_leave_their_record(unsigned count) {
  unsigned fitted = 0;
  std::size_t returns = 0;
  std::uint64_t replays = 0;
  for (unsigned seed = 0; seed < count; ++seed) {
    std::mt19937 random(seed);
    const std::string where = "program " + std::to_string(seed) + ": ";
    const Trace record = random_program(random);
    Dice dice(random);
    const RandomPlan plan(dice, record);
    const Trace program = left_early(record, dice);
    const auto free = run(program, {});
    Sizes sizes;
    Drop drop(sizes);
    for (const double fraction : {0.8, 0.6, 0.4}) {
      Move move(std::size_t{1} << 12);
      RunOptions options;
      options.budget = static_cast<std::size_t>(fraction * static_cast<double>(free->peak_bytes));
      options.guide = plan.guide();
      options.ways = {&move, &drop};
      options.leaves_early = dice.one_in(4);
      const auto found = run(program, options);
      expect(move.is_empty(), where + "no copy outlives the program");
      if (found == nullptr) continue;
      ++fitted;
      returns += move.returns;
      replays += found->replays;
      expect(found->peak_bytes <= options.budget, where + "the budget holds");
      expect(found->operators == free->operators, where + "every operator runs");
    }
  }
  expect(fitted > count && returns > count && replays > count, "programs are put to the test");
}

// ---- what leaves early ------------------------------------------------------------------------

// It counts how often it is asked whether a version may go.
class Asked final : public Way {
 public:
  explicit Asked(bool has_room) : has_room_(has_room) {}

  [[nodiscard]] bool keeps_copy() const override { return true; }
  [[nodiscard]] bool applies(const Version&) const override { return ++times > 0; }
  [[nodiscard]] bool has_room(const Version&) const override { return has_room_; }
  [[nodiscard]] double pays_after(const Version&) const override { return 0; }
  [[nodiscard]] double cost(const Version&) const override { return 1; }
  Place leave(Version&) override { return Place::kAway; }
  Place bring_back(Version&) override { return Place::kHere; }
  void discard(Version&) override {}

  mutable std::size_t times = 0;

 private:
  const bool has_room_;
};

// Each operator reads what the last one made; one of them reads what the first made, too.
Trace held_to_the_end(std::size_t operators) {
  Trace trace;
  std::vector<Trace::Id> made{trace.add_value(1, /*counted=*/false)};
  for (std::size_t i = 0; i < operators; ++i) {
    Trace::Call call("next", {.cost = 1, .output_bytes = 1});
    call.reads = {{made.back()}};
    if (i == operators / 2) call.reads.push_back({made[1]});
    made.push_back(trace.add_value(1, true));
    call.makes = {{made.back()}};
    trace.add_call(std::move(call));
  }
  for (const Trace::Id value : made) trace.add(Trace::What::kRelease, value);
  trace.check();
  return trace;
}

// What two operators have not touched goes, also after it has come back. What stays since there is no room
// is not looked at by each operator that comes.
void what_is_not_in_use_leaves() {
  const auto run_with = [](Asked& way, std::size_t operators) {
    RunOptions options;
    options.ways = {&way};
    options.leaves_early = true;
    options.check = false;  // which asks as well
    return simulate(held_to_the_end(operators), options);
  };
  Asked roomy(/*has_room=*/true);
  const Statistics moved = run_with(roomy, 100);
  expect(moved.peak_bytes <= 5, "what is in use stays, and no more");
  expect(moved.returns == 1 && moved.moves == 98, "each goes once, and twice what came back");

  std::size_t asked = 0;
  for (const std::size_t operators : {1000, 2000}) {
    Asked full(/*has_room=*/false);
    expect(run_with(full, operators).moves == 0, "nothing goes where there is no room");
    expect(asked == 0 || full.times <= 2 * asked + 10, "twice as many operators ask twice as often");
    asked = full.times;
  }
}

// ---- plans over a link ---------------------------------------------------------------------------

constexpr std::size_t kBytes = std::size_t{1} << 20;
constexpr std::size_t kLayers = 12;

// Layers, and their backward, whose graph holds on to all to its end.
Trace layers() {
  Trace trace;
  std::vector<Trace::Id> saved{trace.add_value(kBytes, /*counted=*/false)};
  for (std::size_t i = 0; i < kLayers; ++i) {
    saved.push_back(trace.add_value(kBytes, true));
    Trace::Call call("forward", {.cost = 1e-3, .output_bytes = kBytes});
    call.reads = {{saved[i]}};
    call.makes = {{saved[i + 1]}};
    trace.add_call(std::move(call));
  }
  Trace::Id gradient = saved.back();
  for (std::size_t i = kLayers; i-- > 0;) {
    const Trace::Id next = trace.add_value(kBytes, true);
    Trace::Call call("backward", {.cost = 1.5e-3, .output_bytes = kBytes, .backward = true});
    call.reads = {{saved[i + 1]}, {gradient}};
    if (gradient == saved[i + 1]) call.reads.pop_back();
    call.makes = {{next}};
    trace.add_call(std::move(call));
    if (gradient != saved.back()) trace.add(Trace::What::kRelease, gradient);
    gradient = next;
  }
  for (const Trace::Id value : saved) trace.add(Trace::What::kRelease, value);
  trace.add(Trace::What::kRelease, gradient);
  trace.check();
  return trace;
}

// It carries a value in half the time of a forward's operator.
LinkOptions quick_link(bool drops) {
  return {{0, 5e-4 / kBytes, 5e-4 / kBytes, true}, std::size_t{1} << 30, drops};
}

Plan moving() {
  Plan plan{.prefers = Preference::kMoving};
  plan.score.horizon = Horizon::kNext;
  return plan;
}

// In half of what the layers take, where nothing is dropped.
RunOptions moving_by(const Plan& plan, const Trace& trace) {
  RunOptions options{{.budget = 6 * kBytes}};
  options.guide = guide_of(std::make_shared<const Trace>(trace), plan);
  options.link = quick_link(/*drops=*/false);
  return options;
}

// What the program holds on to and never reads again makes room for what comes back; what goes early is
// not fetched at once.
void returns_come_ahead() {
  const Trace trace = layers();
  for (const bool early : {false, true}) {
    Plan plan = moving();
    if (early) {
      plan.moved.assign(trace.values.size(), true);
      plan.lead = 16;
    }
    const Statistics found = simulate(trace, moving_by(plan, trace));
    expect(found.moves >= kLayers - 6, "values are moved");
    expect(found.moves <= kLayers, "each once, at most");
    expect(found.late_returns == 0, "none is waited for");
    expect(found.turned_back == 0, "nor sent back");
  }
}

// A value that every fourth operator reads, such as a gradient that others are added to, goes each time
// where copies are quick. Where operators have waited for them for long, it stays.
void what_comes_back_too_soon_stays_longer() {
  constexpr std::size_t kOperators = 400;
  Trace trace;
  const Trace::Id gradient = trace.add_value(kBytes, true);
  Trace::Id last = trace.add_value(kBytes, /*counted=*/false);
  Trace::Call zeros("zeros", {.cost = 1e-3, .output_bytes = kBytes});
  zeros.makes = {{gradient}};
  trace.add_call(std::move(zeros));
  for (std::size_t i = 0; i < kOperators; ++i) {
    Trace::Call call("next", {.cost = 1e-3, .output_bytes = kBytes});
    call.reads = {{last}};
    if (i % 4 == 0) call.reads.push_back({gradient});
    call.makes = {{trace.add_value(kBytes, true)}};
    const Trace::Id made = call.makes.front().value;
    trace.add_call(std::move(call));
    trace.add(Trace::What::kRelease, last);
    last = made;
  }
  trace.add(Trace::What::kRelease, last);
  trace.add(Trace::What::kRelease, gradient);
  trace.check();
  const auto moves_if_a_return_takes = [&](double seconds) {
    RunOptions options;
    options.leaves_early = true;
    options.link = LinkOptions{{0, 1e-4 / kBytes, seconds / kBytes}, std::size_t{1} << 30, /*drops=*/false};
    return simulate(trace, options).moves;
  };
  expect(moves_if_a_return_takes(1e-4) >= kOperators / 4 - 2, "where copies are quick it goes each time");
  expect(moves_if_a_return_takes(3e-3) < kOperators / 8, "where they are waited for it stays");
}

// Copies go on between operators, too: those that take no time themselves find what comes back.
void pauses_hide_copies() {
  const auto late = [](double pause) {
    Trace trace = layers();
    for (Trace::Call& call : trace.calls) {
      call.cost = 1e-9;
      call.pause = pause;
    }
    return simulate(trace, moving_by(moving(), trace)).late_returns;
  };
  expect(late(0) > 2, "returns are waited for");
  expect(late(1.5e-3) == 0, "what lies between operators hides them");
}

// Whoever has its address finds the bytes where they were.
void what_is_addressed_stays() {
  Trace trace = layers();
  std::vector<Trace::Event> events;
  for (const Trace::Event& event : trace.events) {
    events.push_back(event);
    if (events.size() == 4) events.push_back({Trace::What::kAddressed, 2});
  }
  trace.events = std::move(events);
  trace.check();
  Deeds deeds;
  const Statistics found = simulate(trace, moving_by(moving(), trace), &deeds);
  expect(found.moves > 4 && deeds.moved[3], "others move");
  expect(!deeds.moved[2], "what is addressed does not");
}

// A value goes by the way that the plan says, whatever is cheaper.
void plans_decide_by_value() {
  const auto trace = std::make_shared<const Trace>(layers());
  Plan plan{.prefers = Preference::kByValue};
  plan.score.horizon = Horizon::kNext;
  plan.moved.resize(trace->values.size());
  for (std::size_t call = 0; call < kLayers; ++call) {
    plan.moved[trace->calls[call].makes.front().value] = call % 2 == 0;
  }
  RunOptions options{{.budget = 6 * kBytes}};
  options.guide = guide_of(trace, plan);
  options.link = quick_link(/*drops=*/true);
  Deeds deeds;
  const Statistics found = simulate(*trace, options, &deeds);
  expect(found.moves >= 2 && found.replays >= 2, "some move, and some are dropped");
  for (std::size_t v = 0; v < trace->values.size(); ++v) {
    expect(!deeds.moved[v] || plan.moved[v], "no other value moves");
  }
  for (std::size_t call = 0; call < kLayers; ++call) {
    const bool moves = plan.moved[trace->calls[call].makes.front().value];
    const auto is_replayed = std::ranges::count(deeds.replays, call, &Replayed::call) > 0;
    expect(!moves || !is_replayed, "what moves is not replayed");
  }
}

// Where replays cost more than the plan predicted, what can be moved is. Note [Near the floor], Rule 4.
void plans_that_break_their_word(unsigned count) {
  std::uint64_t replays[2] = {0, 0};
  unsigned moved = 0;
  for (unsigned seed = 0; seed < count; ++seed) {
    std::mt19937 random(seed);
    const auto trace = std::make_shared<const Trace>(random_program(random));
    const auto replays_by = [&](double predicted) -> std::optional<std::uint64_t> {
      RunOptions options{{.budget = run(*trace, {})->peak_bytes * 6 / 10}};
      options.guide = guide_of(trace, {.prefers = Preference::kDropping, .replayed = predicted});
      options.link = LinkOptions{{1e-7, 1e-9, 1e-9}, std::size_t{1} << 20, /*drops=*/true};
      const auto found = run(*trace, options);
      if (!found) return std::nullopt;
      moved += predicted == 0 && found->moves > 0;
      return found->replays;
    };
    const auto if_little = replays_by(0);
    const auto if_much = replays_by(kNever);
    if (!if_little || !if_much) continue;
    replays[0] += *if_little;
    replays[1] += *if_much;
  }
  expect(moved > count / 10, "values are moved in place of being dropped");
  expect(replays[0] < replays[1], "so that less is replayed");
}

// After a plan that broke, calls follow one of another preference, until there is another search.
void plans_that_broke(unsigned count) {
  const LinkOptions link{{1e-7, 1e-9, 1e-9}, std::size_t{1} << 20, /*drops=*/true};
  const auto searched = [&](Program& program, std::size_t budget) {
    begin_search(program, budget, 60, link);
    program.finish();
    return program.guide();
  };
  unsigned others = 0;
  unsigned same_again = 0;
  for (unsigned seed = 0; seed < count; ++seed) {
    std::mt19937 random(seed);
    const std::string where = "program " + std::to_string(seed) + ": ";
    const auto trace = std::make_shared<const Trace>(random_program(random));
    const std::size_t budget = run(*trace, {})->peak_bytes / 2;
    Program program(trace);
    const auto first = searched(program, budget);
    if (!first) continue;
    expect(program.guide()->plan().prefers == first->plan().prefers, where + "none has broken");
    first->note_broken();
    const auto second = program.guide();
    if (second->plan().prefers == first->plan().prefers) continue;  // there is no other
    ++others;
    const auto anew = searched(program, budget + budget / 10);
    Program other(trace);
    const auto fresh = searched(other, budget + budget / 10);
    expect(anew->plan().prefers == fresh->plan().prefers, where + "another search begins anew");
    same_again += anew->plan().prefers == first->plan().prefers;
  }
  expect(others > count / 10 && same_again > 0, "plans are put to the test");
}

// Operators take the medians of three calls, lengthened to what a call takes; what lies between them counts
// where the clock tells it, replays and waiting aside.
void calls_are_timed() {
  constexpr std::size_t kCalls = 3;
  auto trace = std::make_shared<Trace>();
  for (std::size_t i = 0; i < kCalls; ++i) {
    Trace::Call call("aten::mm", {.cost = 100, .output_bytes = 8});
    call.makes = {{trace->add_value(8, true)}};
    trace->add_call(std::move(call));
  }
  const auto is_near = [](double a, double b) { return std::abs(a - b) < 1e-9; };
  for (const bool clocked : {true, false}) {
    Timings timings(clocked, /*drag=*/0);
    timings.add({{50, 50, 50}, {9, 9, 9}});  // others disturbed it
    timings.add({{1, 1, 4}, {0, 2, 0}});
    timings.add({{1, 4, 1}, {0, 2, 3}});
    expect(timings.applied_to(*trace) == nullptr, "two calls are not enough");
    timings.add({{20, 20, 20}, {9, 9, 9}});
    expect(timings.applied_to(*trace) == nullptr, "nor is one that takes far longer");
    timings.add({{4, 1, 1}, {0, 2, 9}});
    const auto timed = timings.applied_to(*trace);
    expect(timed != nullptr, "three that are alike are");
    for (const Trace::Call& call : timed->calls) expect(is_near(call.cost, 2), "the disturbances of each count");
    expect(is_near(timed->cost(), 6), "together they come to what a call takes");
    expect(is_near(timed->elapsed(), clocked ? 11 : 6), "and what lies between counts");
  }

  const auto beside_copies = [&](double copying) {
    Timings timings(/*clocked=*/true, /*drag=*/0.25);
    for (int call = 0; call < 3; ++call) timings.add({{4, 4, 4}, {0, 4, 4}, copying});
    return timings.applied_to(*trace)->elapsed();
  };
  expect(is_near(beside_copies(8), 18), "what copies took is taken off");
  expect(is_near(beside_copies(1000), 16), "but no more than while something was always on its way");

  using namespace std::chrono_literals;
  const auto timings = std::make_shared<Timings>(/*clocked=*/true, /*drag=*/0);
  const auto future = std::make_shared<const Future>(*trace);
  for (int call = 0; call < 3; ++call) {
    Guide guide({trace, future, std::make_shared<const Plan>()}, timings);
    guide.note_taken(1, 0, 0);
    std::this_thread::sleep_for(30ms);
    guide.note_taken(0.005, 0.005, 0);
    std::this_thread::sleep_for(1ms);
    guide.note_taken(0.005, 1000, 0);  // more has been replayed and waited for than has passed
  }
  const auto timed = timings->applied_to(*trace);
  expect(timed != nullptr && timed->calls[1].pause >= 0.02, "a pause is what nothing else explains");
  expect(timed->calls[0].pause == 0 && timed->calls[2].pause == 0, "or nothing");
}

}  // namespace

Tests moving_tests() {
  return {
      {"moves", [] { moves(some(6000)); }},
      {"moves, thrashing", [] { moves_where_replays_thrash(some(300)); }},
      {"leave", [] { programs_that_leave_their_record(some(6000)); }},
      {"early", what_is_not_in_use_leaves},
      {"packs", [] { packs(some(400)); }},
      {"ahead", returns_come_ahead},
      {"too soon", what_comes_back_too_soon_stays_longer},
      {"by value", plans_decide_by_value},
      {"addressed", what_is_addressed_stays},
      {"word", [] { plans_that_break_their_word(400); }},
      {"broken", [] { plans_that_broke(some(200)); }},
      {"timings", calls_are_timed},
      {"pauses", pauses_hide_copies},
  };
}

}  // namespace rematfn
