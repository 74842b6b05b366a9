// SPDX-License-Identifier: Apache-2.0
#include "planning/search.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
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
    {0.5, 0.75, 4, Horizon::kGeometric},
    {1.0, 0.75, 1, Horizon::kGeometric},
    {1.0, 1.0, 1, Horizon::kNext},
    {0.5, 0.75, 1, Horizon::kNext},
    {0.5, 0.5, 4, Horizon::kNext},
    {0.1, 0.75, 1, Horizon::kGeometric},
    {0.5, 1.0, 1, Horizon::kGeometric},
    {0.5, 1.5, 1, Horizon::kHarmonic},
    {0.5, 0.75, 4, Horizon::kNearer},
    kLooksBack,
}};

// That of segments and cut points, whose weights decide for themselves what is held.
constexpr Score kAmongTheRest{0.5, 0.75, 1, Horizon::kNext};

constexpr std::size_t index_of(Preference preference) {
  return static_cast<std::size_t>(preference);
}

constexpr auto kAll = std::numeric_limits<std::uint64_t>::max();
constexpr SearchLimits kNoLimits{.in_vain = kAll, .in_all = kAll};

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

}  // namespace

Search::Search(std::shared_ptr<const Trace> trace, std::shared_ptr<const Future> future,
               std::size_t budget, std::optional<LinkOptions> link)
    : trace_(std::move(trace)), future_(std::move(future)), budget_(budget), link_(link) {
  for (const Trace::Call& call : trace_->calls) program_cost_ += call.cost;
}

void Search::try_settings(const SearchLimits& limits, std::optional<Score> first,
                          std::optional<Policy> online) {
  limits_ = limits;
  online_is_due_ = online.has_value();
  if (online) policy_ = std::move(*online);
  stage_ = Stage::kScores;
  if (first) queue_.push_back({*first, {}, {}});
  for (const Score& score : kPortfolio) queue_.push_back({score, {}, {}});
}

void Search::try_segments(std::size_t count) {
  limits_ = kNoLimits;
  const Segments segments(*trace_);
  if (count > 0) return queue_.push_back({kAmongTheRest, {}, segments.across(count)});
  for (count = 1; count <= segments.calls(); count += count / 4 + 1) {
    queue_.push_back({kAmongTheRest, {}, segments.across(count)});
  }
}

void Search::try_cut_points() {
  limits_ = kNoLimits;
  const Segments segments(*trace_);
  for (std::size_t stride = 1; stride <= segments.cut_points() + 1; stride += stride / 4 + 1) {
    queue_.push_back({kAmongTheRest, {}, segments.at_cut_points(stride)});
  }
}

std::shared_ptr<const Plan> Search::next() {
  if (pending_ || over_) return pending_;
  if (online_is_next()) {
    online_is_due_ = false;
    return pending_ = std::make_shared<Plan>(Plan{.score = policy_.score, .online = true});
  }
  while (must_go_on() || simulated_plans_ == 0 || (reached() > 0 && pays())) {
    if (stage_ == Stage::kPatience && reached() <= program_cost_) queue_.clear();
    if (queue_.empty()) {
      if (!begin_next_stage()) break;
      continue;
    }
    pending_ = std::make_shared<Plan>(std::move(queue_.front()));
    queue_.pop_front();
    return pending_;
  }
  over_ = true;
  queue_.clear();
  return nullptr;
}

// A plan that prefers a way is compared with those that prefer the same, too.
double Search::worth_finishing(const Plan& plan) const {
  if (plan.prefers == Preference::kCheaper) return reached();
  const Best& alike = best_of_[index_of(plan.prefers)];
  return alike.plan ? std::max(reached(), alike.plan->overhead) : kNever;
}

Search::Result Search::simulate(const std::shared_ptr<const Plan>& plan, Effort& effort) const {
  const SimulationOptions options{.budget = budget_,
                                  .policy = policy_,
                                  .guide = std::make_shared<Guide>(trace_, future_, Followed{plan}),
                                  .most_overhead = worth_finishing(*plan),
                                  .effort = &effort,
                                  .link = link_};
  // While nothing fits, a plan that comes to nothing takes its time with walks.
  constexpr std::uint64_t kMostOfOne = 200'000;
  effort.counts_walks = !best_;
  effort.most = best_ ? kAll : effort.operators + std::max<std::uint64_t>(kMostOfOne, 4 * trace_->calls.size());
  Result result;
  try {
    Deeds deeds;
    const Statistics found = rematfn::simulate(*trace_, options, &deeds);
    result.overhead = found.overhead();
    result.replayed = found.replayed_cost;
    result.moved = std::move(deeds.moved);
  } catch (const NoRoom&) {
    // as it was
  } catch (const Stopped&) {
    if (effort.stop) throw;
  }
  return result;
}

void Search::note_result(Result result, std::uint64_t operators) {
  const double overhead = result.overhead;
  pending_->overhead = overhead;
  pending_->replayed = result.replayed;
  const std::shared_ptr<const Plan> plan = std::move(pending_);
  if (plan->online) {
    if (overhead < reached()) online_ = plan;
    return;
  }
  const std::uint64_t begun = std::exchange(simulated_, simulated_ + operators);
  ++simulated_plans_;
  if (overhead == kNever) return;
  const bool better = overhead < reached();
  // Most changes alter nothing by themselves; those that are to come may need them.
  const bool as_good = stage_ == Stage::kLocal && overhead == reached();
  if (better || as_good) best_ = plan;
  Best& alike = best_of_[index_of(plan->prefers)];
  if (!alike.plan || overhead <= alike.plan->overhead) alike = {plan, result.moved};
  if (better || as_good) moved_by_best_ = std::move(result.moved);
  if (better) found_.push_back({begun, plan});
  constexpr double kGain = 0.01;
  if (overhead < (1 - kGain) * gained_) {
    gained_ = overhead;
    last_gain_ = simulated_;
  }
}

bool Search::goes_on(std::uint64_t share) {
  const bool has_more = pending_ ? pending_->online : online_is_next();
  return (simulated_ < share || must_go_on() || simulated_plans_ == 0 || has_more) &&
         next() != nullptr;
}

std::shared_ptr<const Plan> Search::best_within(std::uint64_t share) {
  // The first that fits was looked for however long that took.
  while (found_.size() > 1 && found_[1].begun < share) found_.pop_front();
  if (found_.empty()) return online_;
  const std::shared_ptr<const Plan>& found = found_.front().plan;
  return online_ && online_->overhead < found->overhead ? online_ : found;
}

Search::Contestants Search::contestants() {
  constexpr double kClearlySlower = 1.25;
  constexpr double kAlmost = 1.03;
  if (!link_ || !link_->drops || !over_) return {};
  const std::shared_ptr<const Plan> best = best_within(kAll);
  if (!best) return {};
  const double elapsed = trace_->elapsed();
  const auto is_within = [&](double factor, const std::shared_ptr<const Plan>& plan) {
    return plan && elapsed + plan->overhead <= factor * (elapsed + best->overhead);
  };
  Contestants found{{best}};
  for (const Best& other : best_of_) {
    if (other.plan && other.plan->prefers != best->prefers) found.plans.push_back(other.plan);
  }
  std::ranges::sort(found.plans.begin() + 1, found.plans.end(), {}, &Plan::overhead);
  // Calls decide anew each time what is cheaper; what has been decided by value they do as foretold.
  const bool is_decided = is_within(kAlmost, best_of_[index_of(Preference::kByValue)].plan);
  const auto as_good = std::ranges::count_if(found.plans, [&](const std::shared_ptr<const Plan>& plan) {
    return is_within(kClearlySlower, plan);
  });
  const auto races = [&](const std::shared_ptr<const Plan>& plan) {
    if (!link_->clocked) return plan == best;
    const bool is_undecided = plan->prefers == Preference::kCheaper && !plan->online;
    return is_within(kClearlySlower, plan) && !(is_decided && is_undecided);
  };
  const auto others = std::ranges::stable_partition(found.plans, races);
  found.racing = static_cast<std::size_t>(others.begin() - found.plans.begin());
  found.substitutes = static_cast<std::size_t>(as_good) - found.racing;
  return found;
}

bool Search::pays() const {
  return simulated_ - last_gain_ < limits_.in_vain && simulated_ < limits_.in_all &&
         (limits_.plans < 0 || simulated_plans_ < limits_.plans);
}

bool Search::begin_next_stage() {
  switch (stage_) {
    case Stage::kScores:
      stage_ = Stage::kPatience;
      for (const double patience : {0.0, kNever}) {
        for (Score score : kPortfolio) {
          score.patience = patience;
          queue_.push_back({score, {}, {}});
        }
      }
      return true;
    case Stage::kPatience:
      stage_ = Stage::kMoves;
      try_all_scores(Preference::kMoving);
      return true;
    case Stage::kMoves:
      stage_ = Stage::kDrops;
      try_all_scores(Preference::kDropping);
      return true;
    case Stage::kDrops:
      stage_ = Stage::kPrices;
      for (const Best& best : bests()) {
        for (const double price : {0.5, 0.25, 0.1, 0.0, 2.0}) {
          Plan plan = *best.plan;
          plan.link_price = price;
          queue_.push_back(std::move(plan));
        }
        for (const double lead : {1.0, 16.0, 64.0}) {
          Plan plan = *best.plan;
          plan.lead = lead;
          queue_.push_back(std::move(plan));
        }
      }
      return true;
    case Stage::kPrices:
      stage_ = Stage::kEarly;
      for (const Best& best : bests()) {
        for (const double factor : {1.0, 0.25, 0.5, 1.5, 2.0, 3.0, 4.0, 16.0}) {
          const bool moves = best.plan->prefers == Preference::kMoving;
          Plan plan = moves ? *best.plan : decided(best);
          plan.moved = best.moved;
          plan.lead *= factor;
          queue_.push_back(std::move(plan));
        }
      }
      return true;
    case Stage::kEarly:
      stage_ = Stage::kKept;
      try_what_is_kept();
      return true;
    case Stage::kKept:
      stage_ = Stage::kLocal;
      changes_.emplace(*trace_);
      return true;
    case Stage::kLocal:
      if (changes_->is_empty()) return false;
      queue_.push_back(changed());
      return true;
    case Stage::kListed:
      return false;
  }
  return false;
}

void Search::try_all_scores(Preference preference) {
  if (!link_ || !link_->drops || !best_) return;
  for (const Score& score : kPortfolio) {
    queue_.push_back({.score = score, .prefers = preference});
  }
}

std::vector<Search::Best> Search::bests() const {
  std::vector<Best> found;
  if (!link_ || !best_) return found;
  found.push_back({best_, moved_by_best_});
  for (const Preference preference : {Preference::kMoving, Preference::kCheaper}) {
    const Best& other = best_of_[index_of(preference)];
    if (other.plan && other.plan != best_) found.push_back(other);
  }
  return found;
}

void Search::try_what_is_kept() {
  const std::vector<bool> products = products_of(*trace_);
  const Segments segments(*trace_);
  const auto calls = static_cast<double>(trace_->calls.size());
  const auto try_by = [&](const Score& score, Preference preference) {
    queue_.push_back({.score = score, .weights = dear(products), .prefers = preference});
    queue_.push_back({.score = score, .kept = products, .prefers = preference});
    queue_.push_back({.score = kLooksBack, .kept = products, .prefers = preference});
    for (const double factor : {0.5, 1.0, 2.0}) {
      const auto count = static_cast<std::size_t>(factor * std::sqrt(calls)) + 1;
      std::vector<float> weights = dear(segments.across(count));
      queue_.push_back({.score = score, .weights = std::move(weights), .prefers = preference});
    }
  };
  try_by(best_ ? best_->score : Score(), Preference::kCheaper);
  const Best& drops = best_of_[index_of(Preference::kDropping)];
  if (drops.plan) try_by(drops.plan->score, Preference::kDropping);
}

// By value, as that plan came to it.
Plan Search::decided(const Best& best) const {
  Plan plan = *best.plan;
  if (plan.prefers == Preference::kByValue || !link_->drops) return plan;
  plan.prefers = Preference::kByValue;
  plan.moved = best.moved;
  return plan;
}

// Local search: change one of the best plans a little, and keep what does no harm.
Plan Search::changed() {
  if (!best_) return changes_->of(Plan(), link_ ? &moved_by_best_ : nullptr);
  if (!link_) return changes_->of(*best_, nullptr);
  Best from{best_, moved_by_best_};
  for (const Best& other : best_of_) {
    if (other.plan && other.plan != best_ && changes_->one_in(4)) from = other;
  }
  return changes_->of(changes_->one_in(8) ? decided(from) : *from.plan, &from.moved);
}

}  // namespace rematfn
