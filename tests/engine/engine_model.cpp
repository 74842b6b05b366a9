// SPDX-License-Identifier: Apache-2.0
//
// The engine without tensors: long chains, and random programs by sizes whose every event leaves the
// tables in order. What moves is in moving_model.cpp.
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "engine/domain.h"
#include "move.h"
#include "planning/program.h"
#include "planning/search_thread.h"
#include "random_plan.h"
#include "random_program.h"

using namespace rematfn;

namespace {

// ---- chains -----------------------------------------------------------------------------------

struct Link final : Operation {
  [[nodiscard]] std::string_view name() const override { return "link"; }
  [[nodiscard]] bool writes(std::size_t) const override { return false; }
  void replay(Room& room) override {
    for (Version* output : outputs) {
      if (output != nullptr && output->must_be_replayed() && is_wanted(*output)) {
        room.arrive(*output);
      }
    }
  }
};

// A domain with a table, whose versions are made by hand.
struct Made {
  explicit Made(Sizes& sizes)
      : domain(std::make_shared<Domain>(sizes)),
        table(new Table(domain, *domain, nullptr, kNoBudget, Policy{})) {
    domain->root = table.get();
  }

  // One that the program has.
  Ref<Version> version(double cost = 0, const Ref<Version>& from = {}) {
    Ref<Version> made(new Version);
    made->nbytes = 8;
    made->has_tensor = true;
    const Ref<Link> operation(new Link);
    operation->table = table;
    operation->order = domain->next_order++;
    operation->cost = cost;
    operation->output_bytes = 8;
    ++domain->live_operations;
    operation->inputs.reserve(1);
    if (from) operation->add_input(from);
    operation->add_output(*made);
    domain->admit(*table, *made);
    return made;
  }
  void drop(Ref<Version> version) { domain->release(std::move(version), table, &Store::no_bytes); }

  const std::shared_ptr<Domain> domain;
  const Ref<Table> table;
};

// A chain of so many values, of which the last is the program's; no call of the stack for each.
void a_chain_dies() {
  constexpr int kLinks = 1'000'000;
  Sizes sizes;
  Made all(sizes);
  all.domain->limit_operations(2 * kLinks);
  Ref<Version> latest;
  {
    const DomainLock lock(all.domain);
    for (int i = 0; i < kLinks; ++i) {
      Ref<Version> before = std::exchange(latest, all.version(0, latest));
      if (before) all.drop(std::move(before));
    }
  }
  {
    const DomainLock lock(all.domain);
    all.table->check();
    expect(all.domain->live_operations == kLinks, "the chain is there");
    expect(all.table->resident_bytes() == 8, "what the program has dropped is gone");
    all.drop(std::move(latest));
  }
  const DomainLock lock(all.domain);
  all.table->check();
  expect(all.domain->live_operations == 0 && all.table->resident_bytes() == 0, "and goes as a whole");
}

// ---- what is never read again -------------------------------------------------------------------

// Of a table that may drop or move: what nobody will read goes by dropping alone, but not while a
// replay waits for it. See Note [A version goes by a way], Rule 7.
void what_replays_wait_for_may_be_moved() {
  Sizes sizes;
  Made all(sizes);
  const auto& domain = all.domain;
  Move move(1 << 20);
  all.table->evict_by({&domain->drop_and_replay, &move});
  const DomainLock lock(domain);
  domain->list_candidates();
  Ref<Version> version = all.version(/*cost=*/1);  // to move it is far cheaper
  const auto ways = [&] {
    std::vector<const Way*> found;
    domain->for_each_way(*version, [&](Way& way) { found.push_back(&way); });
    return found;
  };
  using Ways = std::vector<const Way*>;
  const Way* const drop = &domain->drop_and_replay;
  expect(ways() == Ways{drop, &move}, "what may be read again goes either way");
  version->next_use = kNever;
  expect(ways() == Ways{drop}, "what will not be read is dropped");
  rematfn::expect(*version);  // one more pending reader
  expect(ways() == Ways{drop, &move}, "what a replay waits for goes either way");
  expect(domain->evictor.evict_one(*all.table), "it goes");
  domain->end_moves(*all.table);
  expect(version->copied_by() == &move, "and is moved, which is cheaper");
  unexpect(*version);
  all.drop(std::move(version));
}

// ---- random programs --------------------------------------------------------------------------

bool same(const Statistics& a, const Statistics& b) {
  return a.peak_bytes == b.peak_bytes && a.evictions == b.evictions && a.replays == b.replays &&
         a.replayed_cost == b.replayed_cost && a.unconstrained_bytes == b.unconstrained_bytes;
}

// By which policy a run goes.
void choose_policy(Dice& dice, RunOptions& options) {
  options.policy.score = random_score(dice);
  if (dice.one_in(3)) {
    options.policy.keeping.products = dice.one_in(3);
    options.policy.keeping.marks = static_cast<Keeping::Marks>(dice.below(5));
    options.policy.keeping.names = {"a"};
  }
  if (dice.one_in(8)) {
    options.policy.custom_score = [](const Considered& c) {
      return c.consumed ? c.cost + c.ancestors + c.descendants : c.nbytes;
    };
  }
}

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

// A plan that was searched for fits, and costs what it says; within it any level keeps to its budget. Whether
// it has a schedule, which runs of other programs leave on their way.
bool search_for_a_plan(const std::shared_ptr<const Trace>& trace, RunOptions options,
                       const InnerLevel& inner, std::optional<LinkOptions> link,
                       const std::string& where) {
  constexpr std::int64_t kPastMoves = 60;
  Program program(trace);
  begin_search(program, options.budget, link ? kPastMoves : 20, link);
  program.finish();
  options.guide = program.guide();
  if (!options.guide) return false;
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
  options.guide = guide_of(trace, program.plan());
  const auto again = run(*trace, options);
  expect(again != nullptr && same(*guided, *again), where + "wherever its values lie");
  options.guide = program.guide();
  Trace departing = *trace;
  departing.calls[trace->calls.size() / 2].name = "another";
  run(departing, options);
  options.guide = program.guide();
  options.inner = inner;
  run(*trace, options);
  return program.plan().schedule != nullptr;
}

void random_programs(unsigned first, unsigned count) {
  struct {
    std::size_t plain = 0, inside = 0, guided = 0, scheduled = 0;
  } fitted;
  std::uint64_t replays = 0;
  for (unsigned seed = first; seed < first + count; ++seed) {
    std::mt19937 random(seed);
    Dice dice(random);
    const std::string where = "program " + std::to_string(seed) + ": ";
    const auto trace = std::make_shared<const Trace>(random_program(random));
    const std::size_t calls = trace->calls.size();
    RunOptions options;
    choose_policy(dice, options);
    const auto free = run(*trace, options);
    expect(free->evictions == 0 && free->replays == 0, where + "nothing has to go");
    const std::size_t would_be = free->unconstrained_bytes;
    expect(free->peak_bytes >= would_be, where + "the peak is what it would be");
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
      // At times the guide knows another program.
      const RandomPlan plan(dice, dice.one_in(2) ? *trace : random_program(random));
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
    const InnerLevel inner = random_level(dice, calls, options.budget / 2);
    fitted.scheduled += search_for_a_plan(trace, options, inner, random_link(dice), where);
  }
  expect(fitted.plain > count / 3 && fitted.inside > count / 2 && fitted.guided > count / 2 &&
             fitted.scheduled > 0 && replays > count,
         "programs are put to the test");
}

// ---- searches on several threads ----------------------------------------------------------------

// Calls on several threads follow one program while a thread searches, and while it turns to programs
// that are let go of: in the end the plan is the one that a single thread comes to.
void searches(unsigned count) {
  unsigned found = 0;
  for (unsigned seed = 0; seed < count; ++seed) {
    std::mt19937 random(seed);
    const std::string where = "program " + std::to_string(seed) + ": ";
    const auto trace = std::make_shared<const Trace>(random_program(random));
    RunOptions options;
    options.budget = run(*trace, {})->peak_bytes * 6 / 10;
    const auto begin = [&] {
      auto program = std::make_shared<Program>(trace);
      begin_search(*program, options.budget, 30);
      return program;
    };
    const auto alone = begin();
    alone->finish();
    const auto shared = begin();
    std::vector<std::thread> calls;
    for (unsigned call = 1; call <= 3; ++call) {
      calls.emplace_back([&, call] {
        if (call == 2) begin()->follow();  // that one is gone at once
        for (int times = 0; times < 2; ++times) {
          shared->follow();
          RunOptions own = options;
          own.guide = shared->guide();
          if (own.guide) own.policy.score = shared->plan().score;
          run(*trace, own);
        }
      });
    }
    for (std::thread& call : calls) call.join();
    shared->finish();
    expect(shared->plan().overhead == alone->plan().overhead, where + "for as good a plan");
    const Plan plan = alone->plan();
    found += plan.overhead < kNever && (plan.overhead > 0 || plan.schedule);  // something had to go
  }
  expect(found > count / 4, "searches are put to the test");
}

// A way whose copies are there at once, and of which nothing is asked.
struct Courier final : Way {
  [[nodiscard]] bool keeps_copy() const override { return true; }
  [[nodiscard]] bool applies(const Version&) const override { return true; }
  [[nodiscard]] double cost(const Version&) const override { return 1; }
  Place leave(Version&) override { return Place::kLeaving; }
  void discard(Version&) override {}
};

// Prints each transition of the ledger that may happen in a state, and the state it leads to.
void transitions_are_printed() {
  Sizes sizes;
  Made all(sizes);
  const auto& domain = all.domain;
  Courier courier;
  const DomainLock lock(domain);
  using Change = std::function<void(Version&)>;
  const auto lose = [&](Version& v) { domain->lose_bytes(v, Journal::What::kDropped); };
  const auto start_leaving = [&](Version& v) { domain->start_leaving(v, courier); };
  const std::vector<std::pair<std::string, Change>> transitions{
      {"start_leaving", start_leaving},
      {"stay", [&](Version& v) { domain->stay(v); }},
      {"lose_bytes", lose},
      {"start_coming", [&](Version& v) { domain->start_coming(v); }},
      {"stop_coming", [&](Version& v) { domain->stop_coming(v, false); }},
      {"arrive_by_copy", [&](Version& v) { domain->arrive_by_copy(v); }},
      {"arrive", [&](Version& v) { domain->arrive(v); }},
      {"hand_over", [&](Version& v) { domain->hand_over(v, courier); }},
      {"discard_copy", [&](Version& v) {
         if (v.copied_by() != nullptr) return domain->discard_copy(v);
         throw std::logic_error("it has none");
       }},
  };
  const auto leave = [&](Version& v) { start_leaving(v); lose(v); };
  const std::vector<std::pair<std::string, Change>> states{
      {"here", [](Version&) {}},
      {"leaving", start_leaving},
      {"away", lose},
      {"away, a copy", leave},
      {"coming", [&](Version& v) { leave(v); domain->start_coming(v); }},
  };
  const auto state_of = [](const Version& v) -> std::string {
    switch (v.place()) {
      case Place::kHere: return "here";
      case Place::kLeaving: return "leaving";
      case Place::kComing: return "coming";
      case Place::kAway: return v.copied_by() == nullptr ? "away" : "away, a copy";
    }
    return "";
  };
  for (const auto& [state, enter] : states) {
    for (const auto& [name, change] : transitions) {
      const Ref<Version> version = all.version();
      enter(*version);
      expect(state_of(*version) == state, "it is in that state");
      try {
        change(*version);
        std::printf("%s | %s | %s\n", name.c_str(), state.c_str(), state_of(*version).c_str());
      } catch (const std::logic_error&) {
        expect(state_of(*version) == state, "what may not happen has not happened");
      }
      all.table->check();
      domain->expel(*version);
      all.table->check();
      expect(all.table->used_bytes() == 0, "and counts no more");
    }
  }
}

Tests other_tests() {
  return {
      {"transitions", transitions_are_printed},
      {"chain", a_chain_dies},
      {"programs", [] { random_programs(0, some(4000)); }},
      {"waited for", what_replays_wait_for_may_be_moved},
      {"searches", [] { searches(some(400)); }},
  };
}

}  // namespace

int main(int count, char** arguments) {
  Tests tests = moving_tests();
  tests.merge(other_tests());
  run_named(tests, count - 1, arguments + 1);
}
