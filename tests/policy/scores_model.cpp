// SPDX-License-Identifier: Apache-2.0
//
// Scores and the choice of victims on candidates made by hand, against figures worked out by hand.
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include "model.h"
#include "policy/eviction.h"

using namespace rematfn;

namespace {

constexpr double kTick = kOperatorCost;  // the least age
constexpr Score kPlain{.exponent = 1};

// To the precision of the power in it, which is a float's.
void expect_score(const Score& s, const Candidate& c, const ScoreContext& context,
                  double expected, const std::string& what) {
  const double found = score(s, c, context);
  expect(std::abs(found - expected) <= 1e-6 * std::abs(expected),
         what + ": " + std::to_string(found) + " instead of " + std::to_string(expected));
}

Candidate read_candidate() {
  Candidate c;
  c.nbytes = 1;
  c.cost = 1;
  c.consumed = true;
  return c;
}

// Of 8 bytes, cost 3, with ancestors that cost 4.
Candidate large() {
  Candidate c = read_candidate();
  c.nbytes = 8;
  c.cost = 3;
  c.ancestors = 4;
  return c;
}

Candidate costing(double cost) {
  Candidate c = read_candidate();
  c.cost = cost;
  return c;
}

constexpr ScoreContext kTwoSeconds{.now = 2 - kTick, .record_now = 2 - kTick};  // ages of what was accessed at 0: 2

// ---- scores -----------------------------------------------------------------------------------

void parameters() {
  expect_score({}, large(), kTwoSeconds, (3 + 4 / 2.0) / (8 * std::pow(2, 0.6)),
               "cost and half the ancestors over bytes and age to the three fifths");
  const Score asked{.ancestors = 0.25, .exponent = 2, .unread = 3};
  expect_score(asked, large(), kTwoSeconds, (3 + 4 / 4.0) / (8 * 4), "as it was asked for");
  Candidate fresh = large();
  fresh.consumed = false;
  expect_score(asked, fresh, kTwoSeconds, 3 * (3 + 4 / 4.0) / (8 * 4), "until it is read");
  expect_score({}, fresh, kTwoSeconds, 4 * score({}, large(), kTwoSeconds), "four times, by default");
}

void the_least_age() {
  expect_score(kPlain, read_candidate(), {.now = 0}, 1 / kTick,
               "what was touched just now is as old as one small operator");
}

// Accessed at 0, read next at 10: at 2, the age is 2 and the next use 8 away.
void the_next_use() {
  Candidate c = read_candidate();
  c.next_use = 10 - 2 * kTick;
  const auto timed = [&](Horizon horizon, double time, const std::string& what) {
    expect_score({.exponent = 1, .horizon = horizon}, c, kTwoSeconds, 1 / time, what);
  };
  timed(Horizon::kAge, 2, "age, whatever comes");
  timed(Horizon::kGeometric, 4, "geometric: sqrt(2 * 8)");
  timed(Horizon::kHarmonic, 1.6, "harmonic: 1 / (1/2 + 1/8)");
  timed(Horizon::kNearer, 2, "the nearer");
  timed(Horizon::kNext, std::pow(2, 0.25) * std::pow(8, 0.75), "next: 2^(1/4) * 8^(3/4)");
  c.next_use = kUnknown;
  timed(Horizon::kGeometric, 2, "age, where nothing is known");
  c.next_use = kNever;
  c.nbytes = 7;
  expect_score({.horizon = Horizon::kNext}, c, kTwoSeconds, -7, "never read again: free, the larger first");
}

// See Note [Near the floor], Rule 1
void behind_a_front() {
  Candidate c = read_candidate();
  ScoreContext context{.now = 9, .record_now = 9};
  context.front = 5;
  c.last_access = 2 + kTick;
  expect_score(kPlain, c, context, 1 / 3.0, "made 3 before the front");
  c.last_access = 6 + kTick;
  expect_score(kPlain, c, context, 1 / 3.0, "read 3 ago, after the front");
  c.last_access = 2 + kTick;
  c.next_use = 10 - kTick;
  const Score guided{.exponent = 1, .horizon = Horizon::kNearer};
  expect_score(guided, c, context, 1 / 1.0, "whose next use is known needs no front");
}

// See Note [Near the floor], Rule 2
void pending_readers() {
  Candidate c = read_candidate();
  c.pending = true;
  c.consumed = false;
  expect_score(kPlain, c, kTwoSeconds, 4 / 2.0, "spared, it scores as any other");
  ScoreContext context = kTwoSeconds;
  context.prices_pending = true;
  expect_score(kPlain, c, context, 1 / kTick, "priced, it is about to be read, and counts once");
}

void what_is_kept() {
  Candidate c = read_candidate();
  c.kept = true;
  expect(score(kPlain, c, kTwoSeconds) > 1e30, "what is kept goes last");
  c.next_use = kNever;
  expect_score(kPlain, c, kTwoSeconds, -1, "unless it is not read again");
}

// ---- the choice -------------------------------------------------------------------------------

constexpr std::size_t kNobody = ~std::size_t{0};

std::size_t victim(const Score& s, const std::vector<Candidate>& candidates, double now,
                   bool spare_pending = true) {
  const Victims found = choose_victims(s, candidates, {.now = now}, spare_pending, 1, [](auto) {});
  return found.indices.empty() ? kNobody : found.indices[0];
}

void one_victim() {
  std::vector<Candidate> two{costing(5), costing(1)};
  two[1].nbytes = 5;
  expect(victim({}, two, 1) == 1, "cheap and large goes before costly and small");
  two = {costing(1), costing(2)};
  two[0].ancestors = 10;
  expect(victim({}, two, 1) == 1, "what would need many ancestors stays longer");
  expect(victim({.ancestors = 0}, two, 1) == 0, "but for who does not look at them");
  expect(victim({}, {costing(1), costing(1)}, 1) == 0, "the first of equals goes");
  expect(victim({}, {}, 1) == kNobody, "nobody is the victim of nobody");
}

void who_is_spared() {
  std::vector<Candidate> two{costing(1), costing(9)};
  two[0].pinned = true;
  expect(victim({}, two, 1) == 1, "a pinned candidate is never a victim");
  two[1].refused = true;
  expect(victim({}, two, 1, false) == kNobody, "nor is one that somebody holds");
  two = {costing(1), costing(9)};
  two[0].pending = true;
  expect(victim({}, two, 1) == 1, "pending readers protect");
  expect(victim({}, two, 1, false) == 0, "softly");
  two.pop_back();
  expect(victim({}, two, 1) == kNobody, "none but those is left");
}

void a_batch() {
  std::vector<Candidate> candidates;
  for (const double cost : {5, 1, 4, 2, 3, 2}) candidates.push_back(costing(cost));
  const auto choose = [&](std::size_t most) {
    return choose_victims(kPlain, candidates, {.now = 1 - kTick}, true, most, [](auto) {});
  };
  const Victims four = choose(4);
  expect(four.indices == std::vector<std::size_t>{1, 3, 5, 4}, "the lowest, in order");
  expect(four.lowest_left == 4, "and the lowest that is left");
  Victims all = choose(9);
  std::sort(all.indices.begin(), all.indices.end());
  expect(all.indices == std::vector<std::size_t>{0, 1, 2, 3, 4, 5}, "all, where more are asked for");
  expect(all.lowest_left == kNever, "and none is left");
}

// With numbers that are too low the choice is that of the true ones, and few are asked for.
// See Note [Stale scores are too low].
void stale_candidates(std::size_t most, unsigned seed) {
  std::mt19937 random(seed);
  const auto uniform = [&](double low, double high) {
    return std::uniform_real_distribution(low, high)(random);
  };
  std::vector<Candidate> known;
  std::vector<Candidate> true_ones;
  for (int i = 0; i < 200; ++i) {
    Candidate c = read_candidate();
    c.cost = uniform(1, 9);
    c.nbytes = uniform(1, 9);
    c.ancestors = random() % 2 == 0 ? 0 : uniform(0, 3);
    known.push_back(c);
    if (random() % 3 == 0) c.ancestors += uniform(0, 20);
    true_ones.push_back(c);
  }
  const auto choose = [&](std::vector<Candidate> candidates, std::vector<std::size_t>& asked) {
    return choose_victims({}, candidates, {.now = 1, .record_now = 1}, true, most, [&](std::size_t i) {
      candidates[i].ancestors = true_ones[i].ancestors;
      asked.push_back(i);
    });
  };
  std::vector<std::size_t> asked;
  std::vector<std::size_t> asked_of_true_ones;
  const Victims chosen = choose(known, asked);
  const Victims expected = choose(true_ones, asked_of_true_ones);
  const std::string where = "stale, " + std::to_string(most) + ": ";
  expect(chosen.indices.size() == most && chosen.indices == expected.indices, where + "the choice");
  expect(chosen.lowest_left == expected.lowest_left, where + "what is left");
  for (const std::size_t i : chosen.indices) {
    expect(std::find(asked.begin(), asked.end(), i) != asked.end(), where + "a victim is known");
  }
  expect(asked.size() <= 3 * most + 5, where + "few are asked for");
}

}  // namespace

int main() {
  parameters();
  the_least_age();
  the_next_use();
  behind_a_front();
  pending_readers();
  what_is_kept();
  one_victim();
  who_is_spared();
  a_batch();
  for (const std::size_t most : {1, 5, 40}) {
    for (unsigned seed = 0; seed < 20; ++seed) stale_candidates(most, seed);
  }
  return 0;
}
