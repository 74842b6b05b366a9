// SPDX-License-Identifier: Apache-2.0
#include "plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <utility>

#include "domain.h"
#include "segments.h"
#include "simulation.h"

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

class Search {
 public:
  Search(std::shared_ptr<const Trace> trace, std::shared_ptr<const Future> future,
         std::size_t budget, std::function<bool()> go_on, std::function<void(const Plan&)> found)
      : trace_(std::move(trace)),
        future_(std::move(future)),
        budget_(budget),
        go_on_(std::move(go_on)),
        found_(std::move(found)) {}

  void run() {
    for (const Score& score : kPortfolio) {
      consider({score, {}, {}});
      if (best_.replayed_cost < kNever && !go_on_()) return;
    }
    if (!try_patience()) return;
    const Score score = best_.score;
    const auto calls = static_cast<double>(trace_->calls.size());
    const std::vector<bool> products = products_of(*trace_);
    for (Plan plan : {Plan{score, dear(products), {}}, Plan{score, {}, products},
                      Plan{kLooksBack, {}, products}}) {
      if (!go_on_()) return;
      consider(std::move(plan));
    }
    const Segments segments(*trace_);
    for (const double factor : {0.5, 1.0, 2.0}) {
      const auto count = static_cast<std::size_t>(factor * std::sqrt(calls)) + 1;
      if (!go_on_()) return;
      consider({score, dear(segments.across(count)), {}});
    }
    improve();
  }

  void cut_into(std::size_t count) {
    const Segments segments(*trace_);
    if (count > 0) return consider({kAmongTheRest, {}, segments.across(count)});
    for (count = 1; count <= segments.calls(); count += count / 4 + 1) {
      consider({kAmongTheRest, {}, segments.across(count)});
    }
  }

  void cut_at_points() {
    const Segments segments(*trace_);
    for (std::size_t stride = 1; stride <= segments.cut_points() + 1; stride += stride / 4 + 1) {
      consider({kAmongTheRest, {}, segments.at_cut_points(stride)});
    }
  }

 private:
  // Where replays run away all the same, when to price pending readers is tried out as well. False if
  // time is up. See Note [Pending readers have a price].
  bool try_patience() {
    double program = 0;
    for (const Trace::Call& call : trace_->calls) program += call.cost;
    for (const double patience : {0.0, kNever}) {
      for (Score score : kPortfolio) {
        if (best_.replayed_cost <= program) return true;
        if (!go_on_()) return false;
        score.patience = patience;
        consider({score, {}, {}});
      }
    }
    return true;
  }

  // Simulates the plan; keeps it if it is the best so far, or, if asked to, as good.
  void consider(Plan plan, bool or_as_good = false) {
    const auto guide =
        std::make_shared<Guide>(trace_, future_, std::make_shared<const Plan>(plan));
    try {
      plan.replayed_cost =
          simulate(*trace_, {.budget = budget_, .score = plan.score, .guide = guide,
                             .most_replayed_cost = best_.replayed_cost})
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
  void improve() {
    Dice dice;
    const auto [counted, waiting] = values_by_wait();
    if (counted.empty()) return;
    while (best_.replayed_cost > 0 && go_on_()) {
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

  static void change_score(Plan& plan, Dice& dice) {
    const auto about = [&](double x) { return x * std::exp2(2 * dice.fraction() - 1); };
    plan.score.exponent = std::clamp(about(plan.score.exponent), 0.1, 4.0);
    plan.score.ancestors = std::clamp(about(plan.score.ancestors), 0.01, 10.0);
    if (dice.one_in(4)) plan.score.unread = dice.one_in(2) ? 1 : 4;
    if (dice.one_in(4)) plan.score.horizon = kHorizons[dice.below(kHorizons.size())];
    if (dice.one_in(8)) plan.weights.clear();
  }

  // Those of one value, or of a few made one after the other.
  static void change_weights(Plan& plan, const std::vector<Trace::Id>& among, float factor,
                             Dice& dice) {
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
  [[nodiscard]] std::pair<std::vector<Trace::Id>, std::vector<Trace::Id>> values_by_wait() const {
    constexpr std::size_t kLong = 50;  // so many times shorter than the program
    const auto& calls = trace_->calls;
    std::vector<std::size_t> accessed(trace_->values.size(), 0);
    std::vector<bool> waits(trace_->values.size(), false);
    for (std::size_t i = 0; i < calls.size(); ++i) {
      for (const Trace::Read& read : calls[i].reads) {
        if (i - accessed[read.value] > calls.size() / kLong) waits[read.value] = true;
        accessed[read.value] = i;
      }
      for (const Trace::Made& made : calls[i].makes) accessed[made.value] = i;
    }
    std::vector<Trace::Id> counted;
    std::vector<Trace::Id> waiting;
    for (Trace::Id v = 0; v < trace_->values.size(); ++v) {
      if (!trace_->values[v].counted || trace_->values[v].nbytes == 0) continue;
      counted.push_back(v);
      if (waits[v]) waiting.push_back(v);
    }
    return {counted, waiting};
  }

  const std::shared_ptr<const Trace> trace_;
  const std::shared_ptr<const Future> future_;
  const std::size_t budget_;
  const std::function<bool()> go_on_;
  const std::function<void(const Plan&)> found_;
  Plan best_;
};

}  // namespace

Future::Future(const Trace& trace) {
  std::vector<double> start(trace.calls.size());
  double clock = 0;
  for (const Trace::Event& event : trace.events) {
    if (event.what != Trace::What::kCall) continue;
    start[event.index] = clock;
    clock += trace.calls[event.index].cost;
  }
  first_.resize(trace.calls.size() + 1);
  made_.resize(trace.calls.size());
  for (std::size_t i = 0; i < trace.calls.size(); ++i) {
    made_[i] = trace.calls[i].makes.size();
    first_[i + 1] = first_[i] + trace.calls[i].reads.size() + made_[i];
  }
  next_.resize(first_.back());
  std::vector<double> next(trace.values.size(), kNever);
  for (std::size_t e = trace.events.size(); e-- > 0;) {
    const auto [what, index] = trace.events[e];
    if (what == Trace::What::kSeal) next[index] = clock;
    if (what != Trace::What::kCall) continue;
    const Trace::Call& call = trace.calls[index];
    clock = start[index];
    std::size_t entry = first_[index];
    for (const Trace::Read& read : call.reads) next_[entry++] = next[read.value];
    for (const Trace::Made& made : call.makes) next_[entry++] = next[made.value];
    for (const Trace::Read& read : call.reads) next[read.value] = clock;
  }
}

Guide::Guide(std::shared_ptr<const Trace> trace, std::shared_ptr<const Future> future,
             std::shared_ptr<const Plan> plan)
    : trace_(std::move(trace)), future_(std::move(future)), plan_(std::move(plan)) {}

bool Guide::follow(const ObservedCall& seen) {
  const std::size_t index = next_call_++;
  if (index >= trace_->calls.size()) return false;
  const Trace::Call& call = trace_->calls[index];
  if (call.name != seen.name || call.reads.size() != seen.reads.size() ||
      call.makes.size() != seen.makes.size()) {
    return false;
  }
  for (std::size_t i = 0; i < call.reads.size(); ++i) {
    const Trace::Id value = call.reads[i].value;
    Version& version = *seen.reads[i].version;
    if (version.value == kNoValue && !trace_->values[value].counted) version.value = value;
    if (version.value != value) return false;
  }
  for (std::size_t i = 0; i < call.makes.size(); ++i) {
    if (seen.makes[i].version->nbytes != trace_->values[call.makes[i].value].nbytes) return false;
  }
  for (std::size_t i = 0; i < call.reads.size(); ++i) {
    advise(*seen.reads[i].version, call.reads[i].value, future_->after_read(index, i));
  }
  for (std::size_t i = 0; i < call.makes.size(); ++i) {
    advise(*seen.makes[i].version, call.makes[i].value, future_->after_made(index, i));
  }
  return true;
}

void Guide::advise(Version& version, Trace::Id value, double next_use) const {
  version.value = value;
  version.next_use = next_use;
  if (!plan_->weights.empty()) version.weight = plan_->weights[value];
  // An inner level's policy decides for itself.
  const bool outermost = version.table && !version.table->enclosing;
  if (outermost && !plan_->kept.empty()) version.kept = plan_->kept[value];
  if (version.producer) {
    for (const Input& input : version.producer->inputs) {
      const Version& source = *input.version;
      // It is kept for those made from it, and there may be none any more.
      if (source.kept && source.slot != kNoSlot) mark_stale(source, /*lower=*/true);
    }
  }
  if (version.slot == kNoSlot) return;
  Candidate& candidate = version.table->candidates[version.slot];
  candidate.weight = weight_of(version);
  mark_stale(version, /*lower=*/true);
}

Program::Program(std::shared_ptr<const Trace> recorded)
    : trace(std::move(recorded)), future_(std::make_shared<const Future>(*trace)) {}

bool Program::search(std::size_t budget, Strategy strategy, std::size_t segments,
                     const std::function<bool()>& go_on) {
  {
    const std::lock_guard guard(mutex_);
    if (budget != budget_) plan_.reset();
    budget_ = budget;
  }
  Search search(trace, future_, budget, go_on, [&](const Plan& found) {
    const std::lock_guard guard(mutex_);
    const bool better = !plan_ || found.replayed_cost < plan_->replayed_cost;
    if (budget == budget_ && better) plan_ = std::make_shared<const Plan>(found);
  });
  switch (strategy) {
    case Strategy::kBest:
      search.run();
      break;
    case Strategy::kSegments:
      search.cut_into(segments);
      break;
    case Strategy::kCutPoints:
      search.cut_at_points();
      break;
  }
  const std::lock_guard guard(mutex_);
  return plan_ != nullptr;
}

std::shared_ptr<Guide> Program::guide() const {
  const std::lock_guard guard(mutex_);
  if (!plan_) return nullptr;
  return std::make_shared<Guide>(trace, future_, plan_);
}

Plan Program::plan() const {
  const std::lock_guard guard(mutex_);
  return plan_ ? *plan_ : Plan();
}

}  // namespace rematfn
