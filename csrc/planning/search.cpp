// SPDX-License-Identifier: Apache-2.0
#include "planning/search.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <utility>

#include "engine/domain.h"
#include "planning/segments.h"
#include "planning/simulation.h"

namespace rematfn {
namespace {

// What the first call runs with, by default.
constexpr Score kLooksBack;

// The settings of the score among which a trace decides. What differs: how the past and the future
// are weighed, how much the ancestors count, and whether what nobody has read yet is spared.
constexpr std::array<Score, 10> kPortfolio{{
    {ScoreKind::kOn, 0.5, 0.75, 4, Horizon::kGeometric},
    {ScoreKind::kOn, 1.0, 0.75, 1, Horizon::kGeometric},
    {ScoreKind::kOn, 1.0, 1.0, 1, Horizon::kNext},
    {ScoreKind::kOn, 0.5, 0.75, 1, Horizon::kNext},
    {ScoreKind::kOn, 0.5, 0.5, 4, Horizon::kNext},
    {ScoreKind::kOn, 0.1, 0.75, 1, Horizon::kGeometric},
    {ScoreKind::kOn, 0.5, 1.0, 1, Horizon::kGeometric},
    {ScoreKind::kOn, 0.5, 1.5, 1, Horizon::kHarmonic},
    {ScoreKind::kOn, 0.5, 0.75, 4, Horizon::kNearer},
    kLooksBack,
}};

// That of segments and cut points, whose weights decide for themselves what is held.
constexpr Score kAmongTheRest{ScoreKind::kOn, 0.5, 0.75, 1, Horizon::kNext};

// What the search may exchange for one another.
constexpr std::array kHorizons{Horizon::kAge, Horizon::kGeometric, Horizon::kHarmonic,
                               Horizon::kNearer, Horizon::kNext};

constexpr float kMostWeight = 1e9F;

std::vector<float> dear(const std::vector<bool>& values) {
  constexpr float kDear = 1e3F;
  std::vector<float> weights(values.size());
  std::transform(values.begin(), values.end(), weights.begin(),
                 [](bool is_dear) { return is_dear ? kDear : 1.0F; });
  return weights;
}

// The values that `Speed` keeps.
std::vector<bool> products_of(const Trace& trace) {
  const Keeping speed{.products = true, .names = {}};
  std::vector<bool> values(trace.values.size());
  for (const Trace::Call& call : trace.calls) {
    if (!speed.unmarked(work_of(call.name), call.backward)) continue;
    for (const Trace::Made& made : call.makes) values[made.value] = true;
  }
  return values;
}

class Dice {
 public:
  std::size_t below(std::size_t n) { return random_() % n; }
  bool one_in(std::size_t n) { return below(n) == 0; }
  double fraction() { return static_cast<double>(below(1024)) / 1024; }

 private:
  std::mt19937 random_{20};
};

void change_score(Plan& plan, Dice& dice) {
  const auto about = [&](double x) { return x * std::exp2(2 * dice.fraction() - 1); };
  plan.score.exponent = std::clamp(about(plan.score.exponent), 0.1, 4.0);
  plan.score.ancestors = std::clamp(about(plan.score.ancestors), 0.01, 10.0);
  if (dice.one_in(4)) plan.score.unread = dice.one_in(2) ? 1 : 4;
  if (dice.one_in(4)) plan.score.horizon = kHorizons[dice.below(kHorizons.size())];
  if (dice.one_in(8)) plan.weights.clear();
}

// Those of one value, or of a few made one after the other.
void change_weights(Plan& plan, const std::vector<Trace::Id>& among, float factor, Dice& dice) {
  if (among.empty()) return;
  const std::size_t first = dice.below(among.size());
  const std::size_t length = dice.one_in(4) ? 1 + dice.below(8) : 1;
  for (std::size_t i = first; i < std::min(first + length, among.size()); ++i) {
    float& weight = plan.weights[among[i]];
    weight = std::clamp(weight * factor, 1 / kMostWeight, kMostWeight);
  }
}

// All values that count, and those that the program leaves alone for long: the others are hardly
// ever victims, whatever they weigh.
std::pair<std::vector<Trace::Id>, std::vector<Trace::Id>> values_by_wait(const Trace& trace) {
  constexpr std::size_t kLong = 50;  // so many times shorter than the program
  const auto& calls = trace.calls;
  std::vector<std::size_t> accessed(trace.values.size(), 0);
  std::vector<bool> waits(trace.values.size(), false);
  for (std::size_t i = 0; i < calls.size(); ++i) {
    for (const Trace::Read& read : calls[i].reads) {
      if (i - accessed[read.value] > calls.size() / kLong) waits[read.value] = true;
      accessed[read.value] = i;
    }
    for (const Trace::Made& made : calls[i].makes) accessed[made.value] = i;
  }
  std::vector<Trace::Id> counted;
  std::vector<Trace::Id> waiting;
  for (Trace::Id v = 0; v < trace.values.size(); ++v) {
    if (!trace.values[v].counted || trace.values[v].nbytes == 0) continue;
    counted.push_back(v);
    if (waits[v]) waiting.push_back(v);
  }
  return {counted, waiting};
}

}  // namespace

Search::Search(std::shared_ptr<const Trace> trace, std::shared_ptr<const Future> future,
               std::size_t budget, GoOn go_on, Effort& effort,
               std::function<void(const Plan&)> found)
    : trace_(std::move(trace)),
      future_(std::move(future)),
      budget_(budget),
      go_on_(std::move(go_on)),
      effort_(effort),
      found_(std::move(found)) {}

void Search::run(std::optional<Score> first) {
  if (first) consider({*first, {}, {}});
  if (best_.replayed_cost < kNever && !goes_on()) return;
  for (const Score& score : kPortfolio) {
    consider({score, {}, {}});
    if (best_.replayed_cost < kNever && !goes_on()) return;
  }
  if (!try_patience()) return;
  const Score score = best_.score;
  const auto calls = static_cast<double>(trace_->calls.size());
  const std::vector<bool> products = products_of(*trace_);
  for (Plan plan : {Plan{score, dear(products), {}}, Plan{score, {}, products},
                    Plan{kLooksBack, {}, products}}) {
    if (!goes_on()) return;
    consider(std::move(plan));
  }
  const Segments segments(*trace_);
  for (const double factor : {0.5, 1.0, 2.0}) {
    const auto count = static_cast<std::size_t>(factor * std::sqrt(calls)) + 1;
    if (!goes_on()) return;
    consider({score, dear(segments.across(count)), {}});
  }
  improve();
}

void Search::cut_into(std::size_t count) {
  const Segments segments(*trace_);
  if (count > 0) return consider({kAmongTheRest, {}, segments.across(count)});
  for (count = 1; count <= segments.calls(); count += count / 4 + 1) {
    consider({kAmongTheRest, {}, segments.across(count)});
  }
}

void Search::cut_at_points() {
  const Segments segments(*trace_);
  for (std::size_t stride = 1; stride <= segments.cut_points() + 1; stride += stride / 4 + 1) {
    consider({kAmongTheRest, {}, segments.at_cut_points(stride)});
  }
}

bool Search::try_patience() {
  double program = 0;
  for (const Trace::Call& call : trace_->calls) program += call.cost;
  for (const double patience : {0.0, kNever}) {
    for (Score score : kPortfolio) {
      if (best_.replayed_cost <= program) return true;
      if (!goes_on()) return false;
      score.patience = patience;
      consider({score, {}, {}});
    }
  }
  return true;
}

// Simulates the plan; keeps it if it is the best so far, or, if asked to, as good.
void Search::consider(Plan plan, bool or_as_good) {
  const auto guide =
      std::make_shared<Guide>(trace_, future_, std::make_shared<const Plan>(plan));
  try {
    plan.replayed_cost =
        simulate(*trace_, {.budget = budget_, .score = plan.score, .guide = guide,
                           .most_replayed_cost = best_.replayed_cost, .effort = &effort_})
            .replayed_cost;
  } catch (const NoRoom&) {
    return;
  }
  const bool better = plan.replayed_cost < best_.replayed_cost;
  if (!better && !(or_as_good && plan.replayed_cost == best_.replayed_cost)) return;
  best_ = std::move(plan);
  if (better) found_(best_);
}

// Local search: change the score, or the weights of some values, and keep what does no harm. Most
// changes alter nothing by themselves; those that are to come may need them. A fixed sequence of
// random numbers, so that a search of as many steps finds the same.
void Search::improve() {
  Dice dice;
  const auto [counted, waiting] = values_by_wait(*trace_);
  if (counted.empty()) return;
  while (best_.replayed_cost > 0 && goes_on()) {
    Plan plan = best_;
    if (dice.one_in(3)) {
      change_score(plan, dice);
    } else {
      plan.weights.resize(trace_->values.size(), 1);
      const float factor = dice.one_in(2) ? 4.0F : 64.0F;
      const bool dearer = dice.one_in(2);
      change_weights(plan, dice.one_in(4) ? counted : waiting, dearer ? factor : 1 / factor, dice);
      // At times in exchange for others.
      if (dice.one_in(3)) change_weights(plan, waiting, dearer ? 1 / factor : factor, dice);
    }
    consider(std::move(plan), /*or_as_good=*/true);
  }
}

}  // namespace rematfn
