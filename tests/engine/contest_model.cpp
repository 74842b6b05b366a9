// SPDX-License-Identifier: Apache-2.0
//
// contest_model.cpp: tests of plans that calls decide between.

#include "contest_model.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/contest.h"
#include "planning/program.h"
#include "planning/search.h"
#include "random_program.h"

namespace rematfn {
namespace {

constexpr auto kAll = std::numeric_limits<std::uint64_t>::max();
constexpr LinkOptions kLink{{1e-7, 1e-9, 1e-9}, std::size_t{1} << 20, /*drops=*/true, /*clocked=*/true};

}  // namespace

// They are followed in turn, and from then on the one whose calls took least of their rounds.
void a_contest() {
  constexpr double kUntypical = 1;
  std::vector<std::shared_ptr<const Plan>> plans;
  for (int i = 0; i < 3; ++i) plans.push_back(std::make_shared<const Plan>());
  Contest contest({{plans[0]}, {plans[1]}, {plans[2]}}, 3);
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
  follow({9.3, 9, 11});
  follow({3.1, 5, kNever});
  follow({3.1, 3, kNever});
  for (int i = 0; i < 8; ++i) follow({3.1, 3, kNever});  // chance may explain three percent
  expect(contest.next().plan == plans[1], "the fastest of most rounds wins");
  contest.note(*plans[1], 99);
  contest.note(*plans[0], 1);
  expect(contest.next().plan == plans[1], "what comes after the contest does not count");

  Contest close({{plans[0]}, {plans[1]}}, 2);
  unsigned rounds = 0;
  for (; close.next().plan == plans[0]; ++rounds) {
    close.note(*plans[0], 1.06);
    close.note(*plans[1], 1);
  }
  expect(rounds == 14, "six percent take so many rounds");

  Contest stalled({{plans[0]}, {plans[1]}}, 2);
  for (unsigned round = 0; round < 16; ++round) {
    stalled.note(*plans[0], round == 2 || round == 3 ? 2 : 1);
    stalled.note(*plans[1], 1.1);
  }
  expect(stalled.next().plan == plans[0], "two slow rounds do not decide");

  Contest refused({{plans[0]}, {plans[1]}}, 2);
  refused.note(*plans[0], 1);
  refused.note(*plans[0], kNever);
  for (int i = 0; i < 3; ++i) {
    expect(refused.next().plan == plans[1], "a plan whose call was refused is out");
    refused.note(*plans[1], 7);
  }
  expect(refused.next().plan == plans[1], "for good");
  expect(Contest({{plans[0]}}, 1).next().plan == plans[0], "one alone wins");

  Contest broken({{plans[0]}, {plans[1]}, {plans[2]}}, 2);
  broken.note_broken(*plans[0]);
  broken.note(*plans[1], 99);
  expect(broken.next().plan == plans[1], "who stands by does so while another is left");
  broken.note_broken(*plans[1]);
  expect(broken.next().plan == plans[2], "and takes the place of the last");
  broken.note_broken(*plans[2]);
  expect(broken.next().plan == plans[0], "where all are broken, the best is followed");

  Contest substituted({{plans[0]}, {plans[1]}, {plans[2]}}, 2, 1);
  substituted.note(*plans[0], 1);
  substituted.note_broken(*plans[1]);
  substituted.note_broken(*plans[1]);
  for (const std::size_t plan : {0, 2, 0, 2}) {
    expect(substituted.next().plan == plans[plan], "what is as good takes its place, and all begin anew");
    substituted.note(*plans[plan], 1);
  }

  Contest won({{plans[0]}, {plans[1]}, {plans[2]}}, 2);
  won.note(*plans[0], kNever);
  won.note_broken(*plans[1]);
  expect(won.next().plan == plans[0], "who was out for its time comes back");
}

// Calls of a program that may move decide, once its costs are known and its search is over.
void contests(unsigned count) {
  unsigned held = 0;
  for (unsigned seed = 0; seed < count; ++seed) {
    std::mt19937 random(seed);
    const std::string where = "program " + std::to_string(seed) + ": ";
    const auto trace = std::make_shared<const Trace>(random_program(random));
    SimulationOptions options;
    options.budget = run(*trace, {})->peak_bytes * 6 / 10;
    options.link = kLink;
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

namespace {

using Overheads = std::map<Preference, double>;  // in seconds, of a program that takes one

// A search whose plans cost so much, by what they prefer; each has moved what `moved` says.
class Pretended {
 public:
  explicit Pretended(const Overheads& overheads, std::vector<bool> moved = {}) : overheads_(overheads) {
    constexpr std::size_t kCalls = 16;
    Trace trace;
    for (std::size_t i = 0; i < kCalls; ++i) {
      Trace::Call call("aten::mm", {.cost = 1.0 / kCalls, .output_bytes = 8});
      call.makes = {{trace.add_value(8, true)}};
      trace.add_call(std::move(call));
    }
    moved.resize(kCalls);
    moved_ = std::move(moved);
    const auto recorded = std::make_shared<const Trace>(std::move(trace));
    search_.emplace(recorded, std::make_shared<const Future>(*recorded), std::size_t{1}, kLink);
    search_->try_settings({.in_vain = kAll, .in_all = kAll, .plans = 1000}, {});
    while (const auto plan = search_->next()) {
      plans.push_back(*plan);
      search_->note_result({.overhead = overheads_.at(plan->prefers), .moved = moved_}, 1);
    }
  }

  [[nodiscard]] std::multiset<Preference> contestants() {
    const Search::Contestants found = search_->contestants();
    standing_by = found.plans.size() - found.racing;
    std::multiset<Preference> racing;
    for (std::size_t i = 0; i < found.racing; ++i) racing.insert(found.plans[i]->prefers);
    return racing;
  }

  std::vector<Plan> plans;  // that were tried
  std::size_t standing_by = 0;

 private:
  const Overheads overheads_;
  std::vector<bool> moved_;
  std::optional<Search> search_;
};

}  // namespace

// The best plan does, or what is as good and decided by value; and the best of each other kind that is
// not clearly slower.
void who_takes_part() {
  using enum Preference;
  const auto contestants = [](double cheaper, double moving, double dropping, double by_value) {
    Pretended search({{kCheaper, cheaper}, {kMoving, moving}, {kDropping, dropping}, {kByValue, by_value}});
    const auto racing = search.contestants();
    expect(racing.size() + search.standing_by == kPreferences, "the others stand by");
    return racing;
  };
  using Kinds = std::multiset<Preference>;
  expect(contestants(0.3, 0.5, 0.9, 0.31) == Kinds{kMoving, kByValue}, "decided by value in its place");
  expect(contestants(0.3, 0.5, 0.4, 0.5) == Kinds{kCheaper, kMoving, kDropping, kByValue}, "or beside it");
  expect(contestants(0.3, 0.9, 0.9, 0.9) == Kinds{kCheaper}, "the best alone");
  expect(contestants(0.4, 0.9, 0.3, 0.9) == Kinds{kCheaper, kDropping}, "the best drops");
}

// A search neither gives up a kind of plans for another that is better, nor forgets what is kept.
void every_kind_is_searched() {
  using enum Preference;
  std::vector<bool> moved(16);
  moved[3] = moved[7] = true;
  for (const Preference best : {kCheaper, kMoving, kDropping, kByValue}) {
    Overheads overheads{{kCheaper, 0.5}, {kMoving, 0.5}, {kDropping, 0.5}, {kByValue, 0.5}};
    overheads[best] = 0.1;
    const Pretended search(overheads, moved);
    for (const Preference kind : {kCheaper, kMoving, kDropping, kByValue}) {
      const auto tried = std::ranges::count(search.plans, kind, &Plan::prefers);
      expect(tried > std::ssize(search.plans) / 20, "plans of every kind are changed");
    }
    const auto is_decided = [&](const Plan& plan) { return plan.prefers == kByValue && plan.moved == moved; };
    expect(std::ranges::any_of(search.plans, is_decided), "what a plan has moved is decided by value");
    for (const Preference kind : {kCheaper, kDropping}) {
      const auto keeps = [&](const Plan& plan) { return plan.prefers == kind && !plan.kept.empty(); };
      expect(std::ranges::any_of(search.plans, keeps), "products are kept");
    }
  }
}

}  // namespace rematfn
