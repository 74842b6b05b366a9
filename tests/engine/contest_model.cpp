// SPDX-License-Identifier: Apache-2.0
//
// contest_model.cpp: tests of plans that calls decide between.

#include "contest_model.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
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

}  // namespace rematfn
