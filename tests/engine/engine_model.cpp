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
#include <random>
#include <string>
#include <string_view>
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
    options.policy.score.kind = kKinds[random() % std::size(kKinds)];
    const auto free = run(*trace, options);
    expect(free != nullptr, where + "without a budget all fits");
    expect(free->evictions == 0 && free->replays == 0, where + "and nothing has to go");
    expect(free->peak_bytes == free->unconstrained_bytes, where + "the peak is what it would be");
    options.policy.evict_everything = true;
    const auto bare = run(*trace, options);
    expect(bare != nullptr && bare->operators == free->operators, where + "all runs on next to nothing");
    expect(bare->unconstrained_bytes == free->unconstrained_bytes, where + "evicted bytes count there");
    options.policy.evict_everything = false;
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
    constexpr auto kAll = std::numeric_limits<std::uint64_t>::max();
    program.search(options.budget, {.in_vain = kAll, .in_all = kAll, .plans = 20});
    program.follow(kAll);
    const auto guide = program.guide();
    if (!guide) continue;
    options.policy.score = program.plan().score;
    options.guide = guide;
    const auto guided = run(*trace, options);
    expect(guided != nullptr && guided->peak_bytes <= options.budget, where + "a plan fits");
    expect(guided->replayed_cost == program.plan().replayed_cost, where + "a plan costs what it says");
  }
  expect(fitted > count && replays > count, "programs are put to the test");
}

// ---- a way that moves -------------------------------------------------------------------------

// Copies numbers of bytes to a place that has room for `most`. Every other copy takes its time.
class Move final : public Way {
 public:
  explicit Move(std::size_t most) : most_(most) {}

  [[nodiscard]] std::string_view name() const override { return "move"; }
  [[nodiscard]] bool keeps_copy() const override { return true; }
  [[nodiscard]] bool applies(const Version&) const override { return true; }
  [[nodiscard]] bool has_room(const Version& version) const override {
    return bytes_ + version.nbytes <= most_;
  }
  [[nodiscard]] double cost(const Version& version) const override {
    return 4e-7 * static_cast<double>(version.nbytes);
  }
  Place leave(Version& version) override {
    expect(version.is_readable(), "what leaves is here");
    expect(copies_.emplace(&version, State::kWhole).second, "what leaves has no copy yet");
    bytes_ += version.nbytes;
    ++moves;
    if (moves % 2 == 0) return Place::kAway;
    copies_[&version] = State::kLeaving;
    return Place::kLeaving;
  }
  Place bring_back(Version& version) override {
    expect(copies_.at(&version) == State::kWhole, "a whole copy comes back");
    ++returns;
    if (returns % 2 == 0) return forget(version), Place::kHere;
    copies_[&version] = State::kComing;
    return Place::kComing;
  }
  void wait(Version& version) override {
    if (copies_.at(&version) == State::kComing) return forget(version);
    expect(copies_.at(&version) == State::kLeaving, "what is waited for is under way");
    copies_[&version] = State::kWhole;
  }
  void discard(Version& version) override {
    expect(copies_.contains(&version), "what is discarded is a copy");
    discards_under_way += copies_[&version] == State::kLeaving;
    forget(version);
  }

  [[nodiscard]] bool is_empty() const { return copies_.empty() && bytes_ == 0; }
  std::size_t moves = 0;
  std::size_t returns = 0;
  std::size_t discards_under_way = 0;

 private:
  enum class State { kLeaving, kWhole, kComing };

  void forget(Version& version) {
    copies_.erase(&version);
    bytes_ -= version.nbytes;
  }

  const std::size_t most_;
  std::size_t bytes_ = 0;
  std::map<const Version*, State> copies_;
};

// One level that moves, one that drops, one within the other, at every budget.
void moves(unsigned count) {
  unsigned fitted = 0;
  unsigned where_dropping_does_not = 0;
  std::size_t moves = 0;
  std::size_t returns = 0;
  std::size_t called_back = 0;
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
    Sizes sizes;
    Drop drop(sizes);
    for (const double fraction : {0.7, 0.4}) {
      const auto budget = static_cast<std::size_t>(fraction * static_cast<double>(free->peak_bytes));
      SimulationOptions dropping;
      dropping.budget = budget;
      const bool fits_by_dropping = run(trace, dropping) != nullptr;
      for (int nesting = 0; nesting < 4; ++nesting) {
        Move move(room);
        SimulationOptions options;
        options.budget = budget;
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
        if (found == nullptr) continue;
        ++fitted;
        replays += found->replays;
        where_dropping_does_not += !fits_by_dropping;
        expect(found->peak_bytes <= budget, where + "the budget holds");
        expect(found->operators == free->operators, where + "every operator runs");
        expect(found->unconstrained_bytes == free->unconstrained_bytes, where + "as much is held");
        expect(nesting != 0 || found->replays == 0, where + "what moves is not replayed");
      }
    }
  }
  expect(fitted > count && moves > count && returns > count && replays > count &&
             called_back > count && where_dropping_does_not > 0,
         "moving is put to the test");
}

const std::map<std::string, std::function<void()>> kTests{
    {"chain", a_chain_dies},
    {"programs", [] { random_programs(0, 6000); }},
    {"moves", [] { moves(3000); }},
};

}  // namespace

int main(int count, char** arguments) {
  try {
    for (int i = 1; i < count; ++i) kTests.at(arguments[i])();
  } catch (const std::exception& error) {
    expect(false, error.what());
  }
}
