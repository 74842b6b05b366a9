// SPDX-License-Identifier: Apache-2.0
//
// The engine without tensors: long chains, and random programs by sizes whose every event leaves the
// tables in order. Prints what went wrong, if anything did.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/domain.h"
#include "planning/program.h"

using namespace rematfn;

namespace {

void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::printf("failed: %s\n", what.c_str());
  std::exit(1);
}

// ---- chains -----------------------------------------------------------------------------------

struct Link final : Operation {
  [[nodiscard]] std::string_view name() const override { return "link"; }
  [[nodiscard]] bool writes(std::size_t) const override { return false; }
  [[nodiscard]] std::size_t replay_bytes() const override { return output_bytes; }
  void replay(Domain& domain) override {
    for (Version* output : outputs) {
      if (output != nullptr && !output->resident && Replayer::is_wanted(*output)) {
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
  Ref<Table> table(new Table(domain, nullptr, kNoBudget, Score{}));
  Ref<Version> latest;
  {
    const DomainLock lock(domain);
    for (int i = 0; i < kLinks; ++i) {
      Ref<Version> version(new Version);
      version->nbytes = 8;
      version->program = true;
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

// ---- random programs --------------------------------------------------------------------------

// Reads, writes, drops, results that leave, operators that cannot be replayed, bytes beside them.
Trace random_program(std::mt19937& random) {
  const auto below = [&](unsigned n) { return static_cast<unsigned>(random() % n); };
  Trace trace;
  std::vector<Trace::Id> alive;
  std::vector<Trace::Id> outside;
  const auto bytes = [&] { return std::size_t{1} << below(8); };
  for (unsigned i = 0, n = 1 + below(3); i < n; ++i) outside.push_back(trace.add_value(bytes(), false));
  const unsigned calls = 5 + below(40);
  for (unsigned c = 0; c < calls; ++c) {
    CallFacts facts;
    facts.cost = 1e-6 * (1 + below(100));
    facts.scratch_bytes = below(4) == 0 ? bytes() : 0;
    facts.replayable = below(12) != 0;
    facts.backward = c > calls / 2;
    Trace::Call call("random", facts);
    for (unsigned i = 0, n = below(4); i < n; ++i) {
      const bool ours = !alive.empty() && below(5) != 0;
      const auto& from = ours ? alive : outside;
      call.reads.push_back({from[below(static_cast<unsigned>(from.size()))]});
    }
    // Writes go to one value that is read once, and has not left.
    std::int32_t over = -1;
    for (std::size_t i = 0; i < call.reads.size() && over < 0; ++i) {
      const Trace::Id value = call.reads[i].value;
      const auto times = std::count_if(call.reads.begin(), call.reads.end(),
                                       [&](const Trace::Read& r) { return r.value == value; });
      const bool ours = std::find(alive.begin(), alive.end(), value) != alive.end();
      if (ours && times == 1 && below(8) == 0) {
        over = static_cast<std::int32_t>(i);
      }
    }
    std::vector<Trace::Id> made;
    if (over >= 0) {
      const Trace::Id old = call.reads[static_cast<std::size_t>(over)].value;
      call.reads[static_cast<std::size_t>(over)].written = true;
      const Trace::Id value = trace.add_value(trace.values[old].nbytes, true);
      call.makes.push_back({value, over});
      std::erase(alive, old);
      made.push_back(value);
    }
    for (unsigned i = 0, n = over >= 0 ? below(2) : 1 + below(2); i < n; ++i) {
      const Trace::Id value = trace.add_value(bytes(), true);
      call.output_bytes += trace.values[value].nbytes;
      call.makes.push_back({value});
      made.push_back(value);
    }
    trace.add_call(std::move(call));
    alive.insert(alive.end(), made.begin(), made.end());
    if (below(20) == 0) trace.add_unrecorded(below(64));
    while (!alive.empty() && below(3) == 0) {
      const std::size_t i = below(static_cast<unsigned>(alive.size()));
      const Trace::Id value = alive[i];
      alive.erase(alive.begin() + static_cast<std::ptrdiff_t>(i));
      if (below(8) == 0) {
        trace.add_seal(value);
        outside.push_back(value);
      } else {
        trace.add_release(value);
      }
    }
  }
  trace.check();
  return trace;
}

bool same(const Statistics& a, const Statistics& b) {
  return a.peak_bytes == b.peak_bytes && a.evictions == b.evictions && a.replays == b.replays &&
         a.replayed_cost == b.replayed_cost && a.unconstrained_bytes == b.unconstrained_bytes;
}

// Null if it does not fit.
std::unique_ptr<Statistics> run(const Trace& trace, SimulationOptions options) {
  options.check = true;
  try {
    return std::make_unique<Statistics>(simulate(trace, options));
  } catch (const NoRoom&) {
    return nullptr;
  }
}

void random_programs(unsigned first, unsigned count) {
  constexpr ScoreKind kKinds[] = {ScoreKind::kOn,   ScoreKind::kDtr, ScoreKind::kEq,
                                  ScoreKind::kLocal, ScoreKind::kMsps, ScoreKind::kLru,
                                  ScoreKind::kLargest};
  unsigned fitted = 0;
  std::uint64_t replays = 0;
  for (unsigned seed = first; seed < first + count; ++seed) {
    std::mt19937 random(seed);
    const std::string where = "program " + std::to_string(seed) + ": ";
    const auto trace = std::make_shared<const Trace>(random_program(random));
    SimulationOptions options;
    options.score.kind = kKinds[random() % std::size(kKinds)];
    const auto free = run(*trace, options);
    expect(free != nullptr, where + "without a budget all fits");
    expect(free->evictions == 0 && free->replays == 0, where + "and nothing has to go");
    expect(free->peak_bytes == free->unconstrained_bytes, where + "the peak is what it would be");
    options.evict_everything = true;
    const auto bare = run(*trace, options);
    expect(bare != nullptr && bare->operators == free->operators, where + "all runs on next to nothing");
    expect(bare->unconstrained_bytes == free->unconstrained_bytes, where + "evicted bytes count there");
    options.evict_everything = false;
    for (const double fraction : {0.9, 0.6, 0.4}) {
      options.budget = static_cast<std::size_t>(fraction * static_cast<double>(free->peak_bytes));
      const auto found = run(*trace, options);
      const auto again = run(*trace, options);
      expect((found == nullptr) == (again == nullptr), where + "twice the same end");
      if (found == nullptr) continue;
      ++fitted;
      replays += found->replays;
      expect(same(*found, *again), where + "twice the same run");
      expect(found->peak_bytes <= options.budget, where + "the budget holds");
      expect(found->operators == free->operators, where + "every operator runs");
      expect(found->unconstrained_bytes == free->unconstrained_bytes, where + "and would hold as much");
    }
    if (seed % 16 != 0) continue;
    Program program(trace);
    Effort effort;
    int plans = 20;
    if (!program.search(options.budget, Strategy::kBest, 0, [&](double) { return --plans > 0; },
                        effort)) {
      continue;
    }
    const auto guide = program.guide();
    if (!guide) continue;
    options.score = program.plan().score;
    options.guide = guide;
    const auto guided = run(*trace, options);
    expect(guided != nullptr && guided->peak_bytes <= options.budget, where + "a plan fits");
    expect(guided->replayed_cost == program.plan().replayed_cost, where + "a plan costs what it says");
  }
  expect(fitted > count && replays > count, "programs are put to the test");
}

const std::map<std::string, std::function<void()>> kTests{
    {"chain", a_chain_dies},
    {"programs", [] { random_programs(0, 6000); }},
};

}  // namespace

int main(int count, char** arguments) {
  try {
    for (int i = 1; i < count; ++i) kTests.at(arguments[i])();
  } catch (const std::exception& error) {
    expect(false, error.what());
  }
}
