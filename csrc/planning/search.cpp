// SPDX-License-Identifier: Apache-2.0
#include "planning/search.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "engine/domain.h"
#include "planning/segments.h"
#include "planning/shortening.h"
#include "planning/simulation.h"

namespace rematfn {
namespace {

// What the first call runs with, by default.
constexpr Score kLooksBack;

// That of segments and cut points too, which decide for themselves what is held.
constexpr Score kAmongTheRest{0.5, 0.75, 1, Horizon::kNext};

// The settings of the score among which a trace decides. What differs: how the past and the future
// are weighed, how much the ancestors count, and whether what nobody has read yet is spared. With five more
// the plans of 61 cells (networks and traces) replay no less.
constexpr std::array<Score, 5> kPortfolio{{
    {0.5, 0.75, 4, Horizon::kGeometric},
    {1.0, 1.0, 1, Horizon::kNext},
    kAmongTheRest,
    {0.5, 1.0, 1, Horizon::kGeometric},
    kLooksBack,
}};

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

bool is_better(const std::shared_ptr<const Plan>& one, const std::shared_ptr<const Plan>& other) {
  return one && (!other || one->overhead < other->overhead);
}

// See Note [A plan for calls that differ]
constexpr double kWorthAGuide = 0.02;

constexpr double kMuch = 0.5;  // of the program, to be replayed

constexpr auto kAll = std::numeric_limits<std::uint64_t>::max();
constexpr SearchLimits kNoLimits{.in_vain = kAll, .in_all = kAll};

}  // namespace

Search::Search(std::shared_ptr<const Trace> trace, std::shared_ptr<const Future> future,
               std::size_t budget, std::optional<LinkOptions> link)
    : trace_(std::move(trace)), future_(std::move(future)), budget_(budget), link_(link) {}

void Search::try_settings(const SearchLimits& limits, std::shared_ptr<const Plan> scheduled,
                          std::optional<Policy> online) {
  if (moves() && link_->drops) {
    dropping_ = std::make_unique<Search>(trace_, future_, budget_, link_);
    dropping_->only_drops_ = true;
    dropping_->try_settings(limits, scheduled, online);
  }
  if (!moves()) carried_over_ = std::move(scheduled);
  limits_ = limits;
  online_is_due_ = online.has_value();
  if (online) policy_ = std::move(*online);
  stage_ = Stage::kScores;
  for (const Score& score : kPortfolio) queue_.push_back({.score = score});
}

void Search::try_segments(std::size_t count) {
  limits_ = kNoLimits;
  const Segments segments(*trace_);
  const std::size_t most = count > 0 ? std::min(count, segments.calls()) : segments.calls();
  for (count = count > 0 ? most : 1; count <= most; count += count / 4 + 1) {
    queue_.push_back({.score = kAmongTheRest, .kept = segments.across(count)});
  }
}

void Search::try_cut_points() {
  limits_ = kNoLimits;
  const Segments segments(*trace_);
  for (std::size_t stride = 1; stride <= segments.cut_points() + 1; stride += stride / 4 + 1) {
    queue_.push_back({.score = kAmongTheRest, .kept = segments.at_cut_points(stride)});
  }
}

// The two take turns, by what they have simulated.
bool Search::only_drops_next() {
  if (!dropping_ || pending_) return false;
  const bool has_turn = over_ || (!has_to_begin() && dropping_->simulated_ <= simulated_);
  const Until until = has_turn && has_dropping_left() ? Until::kOver : schedules_first();
  return dropping_->pending_ || dropping_->goes_on(until);
}

const Search::PlanRef& Search::pend(Plan plan) {
  if (only_drops_) plan.prefers = Preference::kDropping;
  return pending_ = std::make_shared<Plan>(std::move(plan));
}

Plan Search::take_first() {
  Plan plan = std::move(queue_.front());
  queue_.pop_front();
  return plan;
}

// There the first schedule is mostly far better than any score, and soon found. So the first call of a size has one.
// What that replays by the first plan and by the schedule, and how much longer it simulates:
//
//   e3nn's forces at 0.5         0.60 -> 0.13   0.04 s
//   SchNetPack's PaiNN at 0.4    1.99 -> 0.36   0.02 s
//   MACE at 0.3                  1.51 -> 0.46   0.04 s
//   FNO at 0.3                   4.81 -> 1.79   0.01 s
//
// Where less is replayed it pays less: for an LSTM's 4,355 operators at 0.2 it takes 0.2 s, and gains 0.005.
bool Search::first_schedule_is_due() const {
  return may_shorten() && (lacks_room_ || !shortened_) && costs_much(found_or_online());
}

bool Search::costs_much(const PlanRef& plan) const {
  return plan && plan->overhead > kMuch * future_->cost;
}

std::shared_ptr<const Plan> Search::next() {
  if (only_drops_next()) return dropping_->pending_;
  if (pending_ || over_) return pending_;
  if (const PlanRef carried_over = std::exchange(carried_over_, nullptr)) {
    Plan plan = *carried_over;
    plan.shortened = plan.carried_over = true;
    return pend(std::move(plan));
  }
  if (online_is_next()) {
    online_is_due_ = false;
    return pend({.score = policy_.score, .online = true});
  }
  if (first_schedule_is_due() && try_shortened()) return pend(take_first());
  while (must_go_on() || has_to_begin() || (reached() > 0 && pays())) {
    if (queue_.empty()) {
      const bool has_tried = stage_ == Stage::kScores || stage_ == Stage::kKept;
      if (has_tried && try_shortened()) continue;
      if (!begin_next_stage()) break;
      continue;
    }
    return pend(take_first());
  }
  queue_.clear();
  if (try_shortened()) return pend(take_first());
  over_ = true;
  return next();
}

// See Note [Replays that hindsight spares]
bool Search::try_shortened() {
  const bool is_again = !lacks_room_ && scheduled_ && exchanges_left() > 0;
  const PlanRef& run = lacks_room_ ? shortened_ : is_again ? scheduled_ : found_or_online();
  if (!may_shorten() || !run || run->overhead == 0 || (run == shortened_ && !lacks_room_)) return false;
  queue_.push_front(*run);
  queue_.front().shortened = true;
  queue_.front().carried_over = false;
  if (is_again) {
    ++exchanges_;
  } else if (run != shortened_) {
    shortened_ = run;
    spared_ = 0;
    times_spared_ = 0;
  }
  return true;
}

std::shared_ptr<const Schedule> Search::shorten(const PlanRef& plan, Effort& effort) const {
  // See Note [A schedule is squeezed]
  constexpr std::array<double, 3> kParts{0.98, 0.96, 0.93};  // of the budget
  constexpr double kMuchMore = 10;                           // than it is worth finishing
  const bool is_squeezed = plan->schedule && exchanged_in_vain_ > 0 && exchanges_ % 2 == 1;
  const double part = is_squeezed ? kParts[exchanges_ / 2 % kParts.size()] : 1;
  const SimulationOptions options{.budget = static_cast<std::size_t>(part * static_cast<double>(budget_)),
                                  .policy = policy_,
                                  .guide = std::make_shared<Guide>(Followed{trace_, future_, plan}),
                                  .most_overhead = is_squeezed ? kMuchMore * plan->overhead : kNever,
                                  .effort = &effort};
  Deeds deeds;
  effort.counts_walks = false;
  effort.most = kAll;
  const Statistics run = rematfn::simulate(*trace_, options, &deeds);
  if (run.overhead() > options.most_overhead) throw Stopped{};  // it was not finished
  const ExchangeLimits exchanges{.operators = plan->schedule ? exchanges_left() : 0,
                                 .seed = exchanges_,
                                 .only_replayed = policy_.keeping.decides()};
  return shortened(*trace_, budget_ - spared_, deeds.replays, effort, exchanges);
}

// A plan that prefers a way is compared with those that prefer the same, too.
double Search::worth_finishing(const Plan& plan) const {
  if (plan.online) return reached() + kWorthAGuide * future_->cost;
  const Found& alike = best_of_[index_of(plan.prefers)];
  return alike.plan ? std::max(reached(), alike.plan->overhead) : kNever;
}

Search::Found Search::simulate(const PlanRef& tried, Effort& effort) const {
  if (dropping_ && tried == dropping_->pending_) return dropping_->simulate(tried, effort);
  SimulationOptions options{.budget = budget_,
                            .policy = policy_,
                            .most_overhead = worth_finishing(*tried),
                            .effort = &effort,
                            .link = link_};
  // While nothing fits, a plan that comes to nothing takes its time with walks.
  constexpr std::uint64_t kMostOfOne = 200'000;
  effort.counts_walks = !best_.plan;
  const auto most = std::max<std::uint64_t>(kMostOfOne, 4 * trace_->calls.size());
  effort.most = best_.plan ? kAll : effort.operators + most;
  const auto plan = std::make_shared<Plan>(*tried);
  Deeds deeds;
  Statistics found;
  bool fits = false;
  try {
    if (tried->shortened && !tried->carried_over) plan->schedule = shorten(tried, effort);
    options.guide = std::make_shared<Guide>(Followed{trace_, future_, plan});
    found = rematfn::simulate(*trace_, options, &deeds);
    fits = found.overhead() <= options.most_overhead;  // else it was not finished
  } catch (const NoRoom&) {
    // as it was
  } catch (const Stopped&) {
    if (effort.stop) throw;
  }
  plan->overhead = fits ? found.overhead() : kNever;
  plan->replayed = fits ? found.replayed_cost : kNever;
  const bool is_first = tried->shortened && !tried->schedule;
  return {plan, std::move(deeds.moved), is_first && options.guide ? options.guide->lacked() : 0};
}

void Search::note_result(const Found& found, std::uint64_t operators) {
  if (dropping_ && dropping_->pending_) {
    dropping_->note_result(found, operators);
    const PlanRef& dropping = dropping_->best_.plan;
    const bool is_new = dropping != best_of_[index_of(Preference::kDropping)].plan;
    if (is_new) note_found({dropping, std::vector<bool>(trace_->values.size())});
    return;
  }
  pending_.reset();
  const PlanRef& plan = found.plan;
  const double overhead = plan->overhead;
  if (plan->shortened) {
    shortening_ += operators;
    constexpr double kGain = 0.01;
    const double before = scheduled_ ? scheduled_->overhead : kNever;
    exchanged_in_vain_ = overhead < (1 - kGain) * before ? 0 : exchanged_in_vain_ + operators;
    if (overhead < before) scheduled_ = plan;
    constexpr std::size_t kLittle = 64;  // of the budget, a part
    constexpr int kMostTimes = 4;
    lacks_room_ = found.lacked > 0 && found.lacked <= budget_ / kLittle && times_spared_++ < kMostTimes;
    if (lacks_room_) spared_ += found.lacked;
    constexpr std::uint64_t kShorter = 8;  // Note [A search is worth what is replayed]
    if (plan->carried_over && scheduled_ == plan) limits_.in_vain /= kShorter;
    return;
  }
  if (plan->online) {
    if (overhead != kNever) online_ = plan;
    return;
  }
  simulated_ += operators;
  ++simulated_plans_;
  if (overhead == kNever) return;
  if (overhead < reached()) found_ = plan;
  if (stage_ <= Stage::kMoves && is_better(plan, general_)) general_ = plan;
  note_found(found);
}

// Of this search, or of the one among plans that only drop.
void Search::note_found(const Found& found) {
  const double overhead = found.plan->overhead;
  Found& alike = best_of_[index_of(found.plan->prefers)];
  if (!is_better(alike.plan, found.plan)) alike = found;
  // Most changes alter nothing by themselves; those that are to come may need them.
  const bool as_good = stage_ == Stage::kLocal && overhead == reached();
  if (overhead < reached() || as_good) best_ = found;
  constexpr double kGain = 0.01;
  if (overhead < (1 - kGain) * gained_) {
    gained_ = overhead;
    last_gain_ = simulated_;
  }
}

bool Search::goes_on(Until until) {
  if (dropping_ && dropping_->goes_on(until == Until::kFits ? until : schedules_first())) return true;
  const bool has_online = pending_ ? pending_->online : online_is_next();
  constexpr std::size_t kMostCalls = 10'000;  // of a program whose schedule a call waits for
  const bool waits = until == Until::kScheduled && trace_->calls.size() <= kMostCalls;
  const bool has_schedule = pending_ ? pending_->shortened : first_schedule_is_due();
  const bool goes = until == Until::kOver || must_go_on() || has_to_begin() || has_online ||
                    (waits && has_schedule);
  return goes && next() != nullptr;
}

Until Search::schedules_first() const {
  return !has_to_begin() && costs_much(best()) ? Until::kScheduled : Until::kFits;
}

// See Note [Guided is never worse than online]
const Search::PlanRef& Search::found_or_online() const {
  return is_better(online_, found_) ? online_ : found_;
}

// See Note [Guided is never worse than online] and Note [Plans that break]
std::shared_ptr<const Plan> Search::best() const {
  PlanRef best = is_better(scheduled_, found_or_online()) ? scheduled_ : found_or_online();
  const PlanRef dropping = dropping_ ? dropping_->best() : nullptr;
  if (is_better(dropping, best)) best = dropping;
  const auto is_broken = [&](const Plan& plan) { return (*broken)[index_of(plan.prefers)].load(); };
  if (!best || !is_broken(*best)) return best;
  PlanRef other;
  const auto consider = [&](const PlanRef& plan) {
    if (plan && !is_broken(*plan) && is_better(plan, other)) other = plan;
  };
  for (const Found& alike : best_of_) consider(alike.plan);
  consider(dropping);
  return other ? other : best;
}

std::shared_ptr<const Plan> Search::scheduled() const {
  if (dropping_) return dropping_->scheduled();
  return is_better(scheduled_, found_or_online()) ? scheduled_ : nullptr;
}

std::shared_ptr<const Plan> Search::general() const {
  const double gain = kWorthAGuide * future_->cost;
  const bool is_worth_it = general_ && (!online_ || general_->overhead + gain <= online_->overhead);
  const PlanRef& found = is_worth_it ? general_ : online_;
  PlanRef dropping = dropping_ ? dropping_->general() : nullptr;
  return is_better(dropping, found) ? dropping : found;
}

// See Note [A search is worth what is replayed]
std::uint64_t Search::most_in_vain() const {
  const PlanRef followed = best();
  const double share = followed ? followed->overhead / (kMuch * future_->cost) : 1;
  return share < 1 ? static_cast<std::uint64_t>(share * static_cast<double>(limits_.in_vain)) : limits_.in_vain;
}

// Operators that the next exchanges may take: in one turn, and in all without a gain.
std::uint64_t Search::exchanges_left() const {
  constexpr std::uint64_t kLonger = 4;
  constexpr std::uint64_t kOneTurn = 250'000;
  const std::uint64_t most = kLonger * most_in_vain();
  return std::min(kOneTurn, most - std::min(most, exchanged_in_vain_));
}

bool Search::pays() const {
  constexpr std::uint64_t kShorter = 4;  // Note [A search is worth what is replayed]
  const std::uint64_t most = most_in_vain();
  const bool exchanges_find_more = stage_ == Stage::kLocal && !moves() && most < limits_.in_vain;
  return simulated_ - last_gain_ < (exchanges_find_more ? most / kShorter : most) && simulated_ < limits_.in_all;
}

bool Search::begin_next_stage() {
  switch (stage_) {
    case Stage::kScores:
      stage_ = Stage::kMoves;
      if (!moves() || !link_->drops || !best_.plan) return true;
      for (const Score& score : kPortfolio) {
        queue_.push_back({.score = score, .prefers = Preference::kMoving});
      }
      return true;
    case Stage::kMoves:
      stage_ = Stage::kKept;
      try_what_is_kept();
      return true;
    case Stage::kKept:
      if (!limits_.local) return false;
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

// What scores and local search do not come to. A DenseNet at 0.3 replays 0.54 without what `Speed` keeps, and
// 0.30 with it; an LSTM at 0.1 0.45 without segments, and 0.37 with them.
void Search::try_what_is_kept() {
  const Score score = best_.plan ? best_.plan->score : Score();
  const std::vector<bool> products = products_of(*trace_);
  queue_.push_back({.score = score, .kept = products});
  queue_.push_back({.score = kLooksBack, .kept = products});
  const Segments segments(*trace_);
  for (const double factor : {0.5, 1.0, 2.0}) {
    const double count = factor * std::sqrt(static_cast<double>(trace_->calls.size()));
    queue_.push_back({.score = score, .kept = segments.across(static_cast<std::size_t>(count) + 1)});
  }
}

// By value, as that plan came to it.
Plan Search::decided(const Found& best) const {
  Plan plan = *best.plan;
  if (plan.prefers == Preference::kByValue || !link_->drops) return plan;
  plan.prefers = Preference::kByValue;
  plan.moved = best.moved;
  return plan;
}

// Local search: change one of the best plans a little, and keep what does no harm.
Plan Search::changed() {
  if (!moves()) return changes_->of(best_.plan ? *best_.plan : Plan(), nullptr);
  Found from = best_;
  if (!from.plan) return changes_->of(Plan(), &from.moved);
  for (const Found& other : best_of_) {
    if (other.plan && other.plan != best_.plan && changes_->one_in(4)) from = other;
  }
  const bool only_drops = from.plan->prefers == Preference::kDropping;
  return changes_->of(only_drops || changes_->one_in(8) ? decided(from) : *from.plan, &from.moved);
}

}  // namespace rematfn
