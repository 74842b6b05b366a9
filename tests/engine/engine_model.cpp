// SPDX-License-Identifier: Apache-2.0
//
// The engine without tensors: long chains, random programs by sizes whose every event leaves the
// tables in order, and a way of letting go that moves numbers. Prints what went wrong, if anything did.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "engine/domain.h"
#include "move.h"
#include "planning/program.h"
#include "planning/search_thread.h"
#include "random_program.h"

using namespace rematfn;

namespace {

// ---- chains -----------------------------------------------------------------------------------

struct Link final : Operation {
  [[nodiscard]] std::string_view name() const override { return "link"; }
  [[nodiscard]] bool writes(std::size_t) const override { return false; }
  [[nodiscard]] std::size_t replay_bytes() const override { return output_bytes; }
  void replay(Domain& domain) override {
    for (Version* output : outputs) {
      if (output != nullptr && output->must_be_replayed() && Replayer::is_wanted(*output)) {
        domain.arrive(*output);
      }
    }
  }
};

// A chain of so many values, of which the last is the program's; no call of the stack for each.
void a_chain_dies() {
  Sizes sizes;
  constexpr int kLinks = 1'000'000;
  const auto domain = std::make_shared<Domain>(sizes);
  domain->trimmer.limit(2 * kLinks);
  Ref<Table> table(new Table(domain, nullptr, kNoBudget, Policy{}));
  Ref<Version> latest;
  {
    const DomainLock lock(domain);
    for (int i = 0; i < kLinks; ++i) {
      Ref<Version> version(new Version);
      version->nbytes = 8;
      version->has_tensor = true;
      const Ref<Link> operation(new Link);
      operation->table = table;
      operation->order = domain->next_order++;
      operation->output_bytes = 8;
      ++domain->live_operations;
      operation->inputs.reserve(1);
      if (latest) operation->add_input(latest);
      operation->add_output(*version);
      table->admit(*version);
      Ref<Version> before = std::move(latest);
      latest = std::move(version);
      if (before) domain->release(std::move(before), table, &Store::no_bytes);
    }
  }
  {
    const DomainLock lock(domain);
    table->check();
    expect(domain->live_operations == kLinks, "the chain is there");
    expect(table->resident_bytes == 8, "what the program has dropped is gone");
    domain->release(std::move(latest), table, &Store::no_bytes);
  }
  const DomainLock lock(domain);
  table->check();
  expect(domain->live_operations == 0 && table->resident_bytes == 0, "and goes as a whole");
}

// ---- what is never read again -------------------------------------------------------------------

// Of a table that may drop or move: what nobody will read goes by dropping alone, but not while a
// replay waits for it. See Note [A version goes by a way], Rule 7.
void what_replays_wait_for_may_be_moved() {
  Sizes sizes;
  const auto domain = std::make_shared<Domain>(sizes);
  const Ref<Table> table(new Table(domain, nullptr, kNoBudget, Policy{}));
  Move move(1 << 20);
  table->let_go_by({&domain->drop_and_replay, &move});
  const DomainLock lock(domain);
  domain->list_candidates();
  Ref<Version> version(new Version);
  version->nbytes = 8;
  version->has_tensor = true;
  const Ref<Link> operation(new Link);
  operation->table = table;
  operation->order = domain->next_order++;
  operation->cost = 1;  // to move it is far cheaper
  ++domain->live_operations;
  operation->add_output(*version);
  table->admit(*version);
  const auto ways = [&] {
    std::vector<std::string_view> names;
    table->for_each_way(*version, [&](Way& way) { names.push_back(way.name()); });
    return names;
  };
  using Names = std::vector<std::string_view>;
  expect(ways() == Names{"drop", "move"}, "what may be read again goes either way");
  version->next_use = kNever;
  expect(ways() == Names{"drop"}, "what will not be read is dropped");
  rematfn::expect(*version);  // one more pending reader
  expect(ways() == Names{"drop", "move"}, "what a replay waits for goes either way");
  expect(domain->evictor.evict_one(*table, /*spare_pending=*/false), "it goes");
  domain->end_moves(*table);
  expect(version->copied_by == &move, "and is moved, which is cheaper");
  unexpect(*version);
  domain->release(std::move(version), table, &Store::no_bytes);
}

// ---- random programs --------------------------------------------------------------------------

bool same(const Statistics& a, const Statistics& b) {
  return a.peak_bytes == b.peak_bytes && a.evictions == b.evictions && a.replays == b.replays &&
         a.replayed_cost == b.replayed_cost && a.unconstrained_bytes == b.unconstrained_bytes;
}

Score random_score(Dice& dice, ScoreKind kind) {
  const auto among = [&](std::initializer_list<double> all) {
    return all.begin()[dice.below(all.size())];
  };
  Score score{.kind = kind};
  score.ancestors = among({0, 0.5, 1});
  score.exponent = among({0.3, 0.6, 1.5});
  score.unread = among({1, 4});
  score.patience = among({0, 0.5, 3, kNever});
  return score;
}

// By which policy a run goes.
void choose_policy(Dice& dice, SimulationOptions& options) {
  constexpr ScoreKind kKinds[] = {ScoreKind::kOn,   ScoreKind::kOn,   ScoreKind::kDtr,
                                  ScoreKind::kEq,   ScoreKind::kLocal, ScoreKind::kMsps,
                                  ScoreKind::kLru, ScoreKind::kLargest};
  options.policy.score = random_score(dice, kKinds[dice.below(std::size(kKinds))]);
  if (dice.one_in(3)) {
    options.policy.keeping.products = dice.one_in(3);
    options.policy.keeping.marks = static_cast<Keeping::Marks>(dice.below(5));
    options.policy.keeping.names = {"a"};
  }
  if (dice.one_in(8)) {
    options.policy.custom_score = [](const Considered& c) {
      return c.consumed ? c.cost + c.ancestors : c.nbytes;
    };
  }
}

// A plan at random; of `trace`, or of a program that goes the same way up to some value.
struct RandomPlan {
  RandomPlan(Dice& dice, const Trace& trace) {
    auto foreseen = std::make_shared<Trace>(trace);
    Plan made;
    made.score = random_score(dice, ScoreKind::kOn);
    made.score.horizon = static_cast<Horizon>(dice.below(5));
    for (std::size_t i = 0; i < trace.values.size(); ++i) {
      made.weights.push_back(dice.one_in(3) ? 1000.0F : 1.0F);
      made.kept.push_back(dice.one_in(4));
    }
    if (dice.one_in(2)) made.kept.clear();
    for (std::size_t i = 0; i < trace.values.size(); ++i) made.moved.push_back(dice.one_in(3));
    if (dice.one_in(2)) made.moved.clear();
    made.prefers = static_cast<Preference>(dice.below(kPreferences));
    if (dice.one_in(3)) dice.among(foreseen->values).nbytes += 1;
    future = std::make_shared<const Future>(*foreseen);
    plan = std::make_shared<const Plan>(std::move(made));
    program = std::move(foreseen);
  }
  [[nodiscard]] std::shared_ptr<Guide> guide() const {
    return std::make_shared<Guide>(program, future, Followed{plan});
  }

  std::shared_ptr<const Trace> program;
  std::shared_ptr<const Future> future;
  std::shared_ptr<const Plan> plan;
};

std::optional<LinkOptions> random_link(Dice& dice) {
  if (dice.one_in(2)) return {};
  const auto seconds = [&] { return 1e-6 * static_cast<double>(dice.below(20)); };
  return LinkOptions{{seconds(), seconds() / 10, seconds() / 10, dice.one_in(2), 0.1},
                     std::size_t{1} << dice.below(12),
                     /*drops=*/!dice.one_in(3)};
}

InnerLevel random_level(Dice& dice, std::size_t calls, std::size_t budget) {
  const std::size_t first = dice.below(calls);
  return {first, first + dice.below(calls - first), budget, {}};
}

// A plan that was searched for fits, and costs what it says; within it any level keeps to its budget.
void search_for_a_plan(const std::shared_ptr<const Trace>& trace, SimulationOptions options,
                       const InnerLevel& inner, std::optional<LinkOptions> link,
                       const std::string& where) {
  constexpr auto kAll = std::numeric_limits<std::uint64_t>::max();
  constexpr std::int64_t kPastPrices = 60;  // of the link
  Program program(trace);
  program.search(options.budget, {.in_vain = kAll, .in_all = kAll, .plans = link ? kPastPrices : 20},
                 {}, link);
  program.follow(kAll);
  options.guide = program.guide();
  if (!options.guide) return;
  options.policy.score = program.plan().score;
  options.policy.keeping = {};
  options.policy.custom_score = {};
  options.inner.reset();
  options.link = link;
  const auto guided = run(*trace, options);
  expect(guided != nullptr, where + "a plan fits");
  expect(guided->overhead() == program.plan().overhead, where + "a plan costs what it says");
  // Other runs leave other addresses to be given out.
  run(*trace, {});
  options.guide = std::make_shared<Guide>(trace, std::make_shared<const Future>(*trace),
                                          Followed{std::make_shared<const Plan>(program.plan())});
  const auto again = run(*trace, options);
  expect(again != nullptr && same(*guided, *again), where + "wherever its values lie");
  options.guide = program.guide();
  options.inner = inner;
  run(*trace, options);
}

void random_programs(unsigned first, unsigned count) {
  struct {
    std::size_t plain = 0, inside = 0, guided = 0;
  } fitted;
  std::uint64_t replays = 0;
  for (unsigned seed = first; seed < first + count; ++seed) {
    std::mt19937 random(seed);
    Dice dice(random);
    const std::string where = "program " + std::to_string(seed) + ": ";
    const auto trace = std::make_shared<const Trace>(random_program(random));
    const std::size_t calls = trace->calls.size();
    SimulationOptions options;
    choose_policy(dice, options);
    const auto free = run(*trace, options);
    expect(free->evictions == 0 && free->replays == 0, where + "nothing has to go");
    const std::size_t would_be = free->unconstrained_bytes;
    expect(free->peak_bytes >= would_be, where + "the peak is what it would be");
    // See Note [What a call would have held]
    expect(options.policy.keeping.decides() || free->peak_bytes == would_be, where + "and no more");
    const std::size_t ample = 3 * free->peak_bytes;
    const auto as_free = [&](const std::unique_ptr<Statistics>& found) {
      expect(found != nullptr && found->operators == free->operators, where + "all operators run");
      expect(found->unconstrained_bytes == free->unconstrained_bytes, where + "as much is held");
    };
    options.inner = random_level(dice, calls, dice.one_in(2) ? kNoBudget : ample);
    options.budget = dice.one_in(2) ? kNoBudget : ample;
    const auto inside = run(*trace, options);
    as_free(inside);
    expect(same(*inside, *free), where + "levels with room change nothing");
    options.budget = options.inner->budget = kNoBudget;
    options.policy.evict_everything = true;
    as_free(run(*trace, options));
    options.policy.evict_everything = false;
    for (const double fraction : {0.9, 0.6, 0.4}) {
      options.budget = static_cast<std::size_t>(fraction * static_cast<double>(free->peak_bytes));
      options.inner.reset();
      if (dice.one_in(2)) {
        const std::size_t budgets[] = {kNoBudget, options.budget / 2, options.budget * 3 / 4, ample};
        options.inner = random_level(dice, calls, budgets[dice.below(4)]);
        if (dice.one_in(4)) std::swap(options.budget, options.inner->budget);
      }
      const RandomPlan plan(dice, *trace);
      const bool is_guided = dice.one_in(2);
      if (is_guided) options.guide = plan.guide();
      const auto found = run(*trace, options);
      if (is_guided) options.guide = plan.guide();
      const auto again = run(*trace, options);
      options.guide.reset();
      expect((found == nullptr) == (again == nullptr), where + "twice the same end");
      if (found == nullptr) continue;
      as_free(found);
      expect(same(*found, *again), where + "twice the same run");
      expect(found->peak_bytes <= options.budget, where + "the budget holds");
      replays += found->replays;
      fitted.plain += !options.inner && !is_guided;
      fitted.inside += options.inner.has_value();
      fitted.guided += is_guided;
    }
    if (seed % 16 != 0) continue;
    options.budget = free->peak_bytes / 2;
    search_for_a_plan(trace, options, random_level(dice, calls, options.budget / 2),
                      random_link(dice), where);
  }
  expect(fitted.plain > count / 3 && fitted.inside > count / 2 && fitted.guided > count / 2 &&
             replays > count,
         "programs are put to the test");
}

// ---- a way that moves -------------------------------------------------------------------------

// By a plan that would rather drop, in the least budget that can be held by moving: more fits
// with that rule than without, and replays less. See Note [Near the floor], Rule 7.
void moves_where_replays_thrash(unsigned count) {
  std::uint64_t replays_if_moved = 0;
  std::uint64_t replays_if_not = 0;
  unsigned refused_if_moved = 0;
  unsigned refused_if_not = 0;
  const auto plan = std::make_shared<const Plan>(Plan{.prefers = Preference::kDropping});
  Sizes sizes;
  Drop drop(sizes);
  for (unsigned seed = 0; seed < count; ++seed) {
    std::mt19937 random(seed);
    const auto trace = std::make_shared<const Trace>(random_program(random));
    const auto future = std::make_shared<const Future>(*trace);
    const auto run_by = [&](std::size_t budget, bool drops, bool moved) {
      Move move(std::size_t{1} << 30);
      SimulationOptions options;
      options.budget = budget;
      options.ways = drops ? std::vector<Way*>{&drop, &move} : std::vector<Way*>{&move};
      if (drops) options.guide = std::make_shared<Guide>(trace, future, Followed{plan});
      options.floor.moved = moved;
      return run(*trace, options);
    };
    std::size_t least = 1;
    while (run_by(least, /*drops=*/false, true) == nullptr) ++least;
    const auto moved = run_by(least, /*drops=*/true, true);
    const auto not_moved = run_by(least, /*drops=*/true, false);
    refused_if_moved += moved == nullptr;
    refused_if_not += not_moved == nullptr;
    if (moved == nullptr || not_moved == nullptr) continue;
    replays_if_moved += moved->replays;
    replays_if_not += not_moved->replays;
  }
  expect(refused_if_moved + count / 20 < refused_if_not, "more fits where what may move does");
  expect(replays_if_moved < replays_if_not, "and replays less");
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
      SimulationOptions dropping;
      dropping.budget = budget;
      const bool fits_by_dropping = run(trace, dropping) != nullptr;
      for (int nesting = 0; nesting < 4; ++nesting) {
        Move move(room, /*may_fail=*/seed % 7 == 0);
        SimulationOptions options;
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

// ---- searches on several threads ----------------------------------------------------------------

// Calls on several threads go on with one search while a thread searches ahead, and while it turns to
// programs that are let go of: the plan is the one that a single thread comes to.
void searches(unsigned count) {
  constexpr auto kAll = std::numeric_limits<std::uint64_t>::max();
  unsigned found = 0;
  for (unsigned seed = 0; seed < count; ++seed) {
    std::mt19937 random(seed);
    const std::string where = "program " + std::to_string(seed) + ": ";
    const auto trace = std::make_shared<const Trace>(random_program(random));
    SimulationOptions options;
    options.budget = run(*trace, {})->peak_bytes * 6 / 10;
    const auto begin = [&] {
      auto program = std::make_shared<Program>(trace);
      program->search(options.budget, {.in_vain = kAll, .in_all = kAll, .plans = 30});
      return program;
    };
    const auto alone = begin();
    const std::uint64_t simulated = alone->follow(kAll);
    const auto shared = begin();
    std::vector<std::thread> calls;
    for (unsigned call = 1; call <= 3; ++call) {
      calls.emplace_back([&, call] {
        search_later(call == 2 ? begin() : shared);  // that one is gone at once
        for (const std::uint64_t share : {simulated * call / 8, simulated * call / 4}) {
          shared->follow(share);
          SimulationOptions own = options;
          own.guide = shared->guide();
          if (own.guide) own.policy.score = shared->plan().score;
          run(*trace, own);
        }
      });
    }
    for (std::thread& call : calls) call.join();
    expect(shared->follow(kAll) == simulated, where + "as much is simulated");
    expect(shared->plan().overhead == alone->plan().overhead, where + "for as good a plan");
    found += alone->plan().overhead < kNever && alone->plan().overhead > 0;
  }
  expect(found > count / 4, "searches are put to the test");
}

// ---- plans that calls decide between ------------------------------------------------------------

// They are followed in turn, and from then on the one whose calls took least of their rounds.
void a_contest() {
  constexpr double kUntypical = 1;
  std::vector<std::shared_ptr<const Plan>> plans;
  for (int i = 0; i < 3; ++i) plans.push_back(std::make_shared<const Plan>());
  Contest contest({{plans[0]}, {plans[1]}, {plans[2]}});
  const auto follow = [&](const std::vector<double>& round) {
    for (std::size_t i = 0; i < round.size(); ++i) {
      if (round[i] == kNever) continue;
      expect(contest.next().plan == plans[i], "plans are followed in turn");
      contest.note(*plans[i], round[i]);
    }
  };
  follow({kUntypical, 9, 9});
  follow({kUntypical, 9, 9});
  follow({3.1, 3, 8});  // the third is disturbed
  follow({3.1, 3, 3.2});
  follow({9.3, 9, 11});  // the machine is slower for a while
  follow({9.3, 9, kNever});
  follow({3.1, 5, kNever});
  follow({3.1, 3, kNever});
  expect(contest.next().plan == plans[1], "the fastest of most rounds wins");
  contest.note(*plans[1], 99);
  contest.note(*plans[0], 1);
  expect(contest.next().plan == plans[1], "what comes after the contest does not count");

  Contest refused({{plans[0]}, {plans[1]}});
  refused.note(*plans[0], 1);
  refused.note(*plans[0], kNever);
  for (int i = 0; i < 3; ++i) {
    expect(refused.next().plan == plans[1], "a plan whose call was refused is out");
    refused.note(*plans[1], 7);
  }
  expect(refused.next().plan == plans[1], "for good");
  expect(Contest({{plans[0]}}).next().plan == plans[0], "one alone wins");
}

// Calls of a program that may move decide, once its costs are known and its search is over.
void contests(unsigned count) {
  constexpr auto kAll = std::numeric_limits<std::uint64_t>::max();
  unsigned held = 0;
  for (unsigned seed = 0; seed < count; ++seed) {
    std::mt19937 random(seed);
    const std::string where = "program " + std::to_string(seed) + ": ";
    const auto trace = std::make_shared<const Trace>(random_program(random));
    SimulationOptions options;
    options.budget = run(*trace, {})->peak_bytes * 6 / 10;
    options.link = LinkOptions{{1e-7, 1e-9, 1e-9}, std::size_t{1} << 20, true, /*clocked=*/true};
    Program program(trace, /*is_timed_anew=*/true);
    program.search(options.budget, {.in_vain = kAll, .in_all = kAll, .plans = 60}, {}, options.link);
    std::vector<Plan> followed;
    for (unsigned call = 0; call < 12; ++call) {
      program.follow(kAll);
      options.guide = program.guide();
      if (!options.guide) break;
      followed.push_back(options.guide->plan());
      expect(run(*trace, options) != nullptr, where + "each of the plans fits");
      options.guide.reset();
    }
    if (followed.empty()) continue;
    std::vector<Preference> preferences;
    for (const Plan& plan : followed) preferences.push_back(plan.prefers);
    const std::set<Preference> families(preferences.begin(), preferences.end());
    if (families.size() < 2) continue;
    ++held;
    for (std::size_t call = 0; call < 2 * families.size(); ++call) {
      const bool is_alike = preferences[call] == preferences[call % families.size()];
      expect(is_alike && preferences[call] != preferences[call + 1], where + "in turn");
    }
  }
  expect(held > count / 10, "contests are put to the test");
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
    if (gradient != saved.back()) trace.add_release(gradient);
    gradient = next;
  }
  for (const Trace::Id value : saved) trace.add_release(value);
  trace.add_release(gradient);
  trace.check();
  return trace;
}

// It carries a value in half the time of a forward's operator.
LinkOptions quick_link(bool drops) {
  return {{0, 5e-4 / kBytes, 5e-4 / kBytes, true}, std::size_t{1} << 30, drops};
}

// What the program holds on to and never reads again makes room for what comes back; what goes early is
// not fetched at once.
void returns_come_ahead() {
  const Trace trace = layers();
  const auto future = std::make_shared<const Future>(trace);
  for (const bool early : {false, true}) {
    Plan plan{.prefers = Preference::kMoving};
    plan.score.horizon = Horizon::kNext;
    if (early) {
      plan.moved.assign(trace.values.size(), true);
      plan.lead = 16;
    }
    SimulationOptions options{.budget = 6 * kBytes, .check = true};
    options.guide = std::make_shared<Guide>(std::make_shared<const Trace>(trace), future,
                                            Followed{std::make_shared<const Plan>(plan)});
    options.link = quick_link(/*drops=*/false);
    const Statistics found = simulate(trace, options);
    expect(found.moves >= kLayers - 6, "values are moved");
    expect(found.moves <= kLayers, "each once, at most");
    expect(found.late_returns == 0, "none is waited for");
    expect(found.turned_back == 0, "nor sent back");
  }
}

// A value goes by the way that the plan says, whatever is cheaper.
void plans_decide_by_value() {
  const auto trace = std::make_shared<const Trace>(layers());
  const auto future = std::make_shared<const Future>(*trace);
  Plan plan{.prefers = Preference::kByValue};
  plan.score.horizon = Horizon::kNext;
  plan.moved.resize(trace->values.size());
  for (std::size_t call = 0; call < kLayers; ++call) {
    plan.moved[trace->calls[call].makes.front().value] = call % 2 == 0;
  }
  SimulationOptions options{.budget = 6 * kBytes, .check = true};
  options.guide = std::make_shared<Guide>(trace, future, Followed{std::make_shared<const Plan>(plan)});
  options.link = quick_link(/*drops=*/true);
  Deeds deeds;
  const Statistics found = simulate(*trace, options, &deeds);
  expect(found.moves >= 2 && found.replays >= 2, "some move, and some are dropped");
  for (std::size_t v = 0; v < trace->values.size(); ++v) {
    expect(!deeds.moved[v] || plan.moved[v], "no other value moves");
  }
  for (std::size_t call = 0; call < kLayers; ++call) {
    const bool moves = plan.moved[trace->calls[call].makes.front().value];
    expect(!moves || deeds.replays[call] == 0, "what moves is not replayed");
  }
}

// Where replays cost more than the plan foretold, what can be moved is. Note [Near the floor], Rule 7.
void plans_that_break_their_word(unsigned count) {
  std::uint64_t replays[2] = {0, 0};
  unsigned moved = 0;
  for (unsigned seed = 0; seed < count; ++seed) {
    std::mt19937 random(seed);
    const auto trace = std::make_shared<const Trace>(random_program(random));
    const auto future = std::make_shared<const Future>(*trace);
    const auto replays_by = [&](double foretold) -> std::optional<std::uint64_t> {
      Plan plan{.prefers = Preference::kDropping, .overhead = foretold};
      SimulationOptions options{.budget = run(*trace, {})->peak_bytes * 6 / 10, .check = true};
      options.guide = std::make_shared<Guide>(trace, future, Followed{std::make_shared<const Plan>(plan)});
      options.link = LinkOptions{{1e-7, 1e-9, 1e-9}, std::size_t{1} << 20, /*drops=*/true};
      const auto found = run(*trace, options);
      if (!found) return std::nullopt;
      moved += foretold == 0 && found->moves > 0;
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

// What was late once does not shrink until it is late again.
void leads_settle() {
  Leads leads(2);
  expect(leads.of(0) == 1 && leads.of(7) == 1, "as the plan says");
  leads.note_early(0);
  expect(leads.of(0) < 1, "what lies waiting begins later");
  leads.note_late(0);
  const double found = leads.of(0);
  expect(found > 1, "what is late begins earlier");
  for (int i = 0; i < 10; ++i) leads.note_early(0);
  expect(leads.of(0) == found, "and goes on so, though it lies waiting");
  leads.note_turned_back(0);
  expect(leads.of(0) < found, "unless its room was wanted");
  for (int i = 0; i < 200; ++i) leads.note_late(0);
  expect(leads.of(0) == 64, "within bounds");
  expect(leads.of(1) == 1, "each value for itself");
}

const std::map<std::string, std::function<void()>> kTests{
    {"chain", a_chain_dies},
    {"programs", [] { random_programs(0, 4000); }},
    {"moves", [] { what_replays_wait_for_may_be_moved(); moves(3000); moves_where_replays_thrash(1000); }},
    {"searches", [] { searches(400); }},
    {"ahead", returns_come_ahead},
    {"by value", plans_decide_by_value},
    {"word", [] { plans_that_break_their_word(400); }},
    {"leads", leads_settle},
    {"contest", [] { a_contest(); contests(200); }},
};

}  // namespace

int main(int count, char** arguments) {
  try {
    for (int i = 1; i < count; ++i) kTests.at(arguments[i])();
  } catch (const std::exception& error) {
    expect(false, error.what());
  }
}
