// SPDX-License-Identifier: Apache-2.0
//
// search.h: tries plans out in the simulator.
//
// Note [A search is a sequence]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// What a search tries next depends on what it has tried, and on nothing else: not on the clock, nor on
// who simulates it. So what it comes to in the end is the same on every machine. For that each step has
// three parts: next() and note_result() are quick and belong under plans_mutex(), simulate() between them
// is neither.
//
// Note [Guided is never worse than online]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// To know the next uses mostly helps, and at times it does not: near the floor the first plan may
// replay twice what the first call did. So the policy of the first call, next uses unknown, is a
// candidate like the others, and is followed until some plan is better by the same count. The search
// must not begin from it: local search would then change a plan whose neighbours, which know the next
// uses, are all worse. So it is simulated beside the sequence, once, right after its first plan, which
// bounds what it may cost; it takes no part in what is tried next, and the better of the two is followed. A custom
// score is Python's, which the search does without: calls that begin with one have no such bound.
//
// Note [A hybrid is never worse than dropping alone]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Where values may be moved and dropped, the plans that only drop are found by a search of their own: with its
// limits, its schedules and its policy to compare with, as without a link (what cannot be replayed moves). The two
// take turns; but where what fits replays much, its first schedule comes first. Local search among the others goes on
// from its best plan, too, and the better of the two results is followed. What the first guided call replays in the
// hybrid, without that schedule and with it (a disk of 1 GB/s):
//
//   e3nn's forces at 0.4      1.49 -> 0.48
//   SchNetPack's PaiNN at 0.4 0.79 -> 0.36
//   MACE at 0.3               0.63 -> 0.46
//
// Note [A search is worth what is replayed]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A search takes the time of a core, and what it can bring at the most is what calls replay. So where they
// replay half of the program or more, it may simulate in vain as many operators as its limit says; where they
// replay less, fewer in proportion. Of 32 networks and traces in budgets of 0.5 to 0.1, plans of 28 cost what they
// did without this rule, and those of four 0.1 to 0.7 % of the program more; a search takes 0.4 of the time
// (medians). One that begins with the schedule of another size of the same program, which fits, may do an eighth
// of that. Steps of libraries, five batches of other sizes at 0.4; seconds of all searches, before both rules and
// now, and what the five calls replay, in costs of the program:
//
//   MACE       30.8 -> 2.1    0.480 -> 0.495
//   TensorNet  16.6 -> 2.4    0.401 -> 0.405
//   PaiNN      31.0 -> 1.4    0.678 -> 0.688
//
// Local search may do a quarter, where less than half of the program is replayed: exchanges find more there. With an
// eighth a ResNet at 0.2 replays 0.281 instead of 0.274, with half 0.270, for twice the time of e3nn's search at 0.4.

#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>

#include "engine/guide.h"
#include "planning/plan_changes.h"
#include "planning/simulation.h"

namespace rematfn {

// How much a search may do. It is counted in operators simulated, replays among them.
struct SearchLimits {
  // Without coming to a plan that replays a hundredth less, where half of the program is replayed; fewer where
  // less is. See Note [A search is worth what is replayed]
  std::uint64_t in_vain = 0;
  std::uint64_t in_all = 0;
  bool local = true;  // whether local search follows
};

// How far a search goes.
enum class Until : std::uint8_t {
  kFits,       // until some plan fits, or there is little hope
  kScheduled,  // the same, and the first schedule, where that plan replays much
  kOver,
};

// For one trace in one budget.
class Search {
 public:
  Search(std::shared_ptr<const Trace> trace, std::shared_ptr<const Future> future,
         std::size_t budget, std::optional<LinkOptions> link = {});

  // What to try, once. The settings that there are; then local search. Goes on within `limits`, and until some
  // plan fits. `scheduled`, of another record of the same program, is tried before all others; `online`, a policy, is
  // compared with what is found.
  void try_settings(const SearchLimits& limits, std::shared_ptr<const Plan> scheduled = nullptr,
                    std::optional<Policy> online = {});
  // Segments alone, as many as asked for; zero: the best number.
  void try_segments(std::size_t count);
  void try_cut_points();

  // The plan to simulate, the same until its result is noted; null if the search is over.
  [[nodiscard]] std::shared_ptr<const Plan> next();
  struct Found {
    std::shared_ptr<const Plan> plan;  // with what it costs, and the schedule of a run that was shortened
    std::vector<bool> moved;           // by value: what went over the link
    std::size_t lacked = 0;            // bytes: the first that a shortened run had no room for
  };
  // Throws Stopped.
  [[nodiscard]] Found simulate(const std::shared_ptr<const Plan>& plan, Effort& effort) const;
  // `operators`: how many it took to simulate.
  void note_result(const Found& found, std::uint64_t operators);

  // Nothing is left to try.
  [[nodiscard]] bool is_over() const { return over_ && !has_dropping_left(); }
  // Whether something is left to try.
  [[nodiscard]] bool goes_on(Until until);
  // The best plan so far, or the policy as it is; null if none fits. Of those that do not prefer what is
  // broken, if there are such.
  [[nodiscard]] std::shared_ptr<const Plan> best() const;
  // The best that says nothing of single values; or null. See Note [A plan for calls that differ]
  [[nodiscard]] std::shared_ptr<const Plan> general() const;
  // The best that is carried out, if it costs less than what is found by scores; or null.
  [[nodiscard]] std::shared_ptr<const Plan> scheduled() const;
  // Operators simulated so far, replays among them, and what shortening takes as long as.
  [[nodiscard]] std::uint64_t simulated() const {
    return simulated_ + shortening_ + (dropping_ ? dropping_->simulated() : 0);
  }
  // For the calls that follow its plans.
  const std::shared_ptr<Broken> broken = std::make_shared<Broken>();

  // Somebody simulates the next plan, in the process with that searcher: a forked child has another.
  const void* simulated_in = nullptr;

 private:
  using PlanRef = std::shared_ptr<const Plan>;
  enum class Stage : std::uint8_t {
    kScores,
    kMoves,  // moving whatever can be moved
    kKept,   // products; what crosses between about sqrt(n) segments
    kLocal,  // search
    kListed,  // what is in the queue, and no more
  };

  [[nodiscard]] double reached() const { return best_.plan ? best_.plan->overhead : kNever; }
  [[nodiscard]] double worth_finishing(const Plan& plan) const;
  [[nodiscard]] std::uint64_t most_in_vain() const;
  [[nodiscard]] std::uint64_t exchanges_left() const;
  [[nodiscard]] bool pays() const;
  // See Note [Guided is never worse than online].
  [[nodiscard]] bool online_is_next() const {
    return online_is_due_ && simulated_plans_ > 0 && reached() > 0;
  }
  // Calls that differ may be ones that no schedule suits.
  [[nodiscard]] bool has_to_begin() const {
    return simulated_plans_ == 0 && (!scheduled_ || !limits_.local);
  }
  // Whether plans may move values.
  [[nodiscard]] bool moves() const { return link_.has_value() && !only_drops_; }
  // Nothing fits yet, not all settings have been tried, and it is not hopeless: a call that will be
  // refused is not to wait for all of them.
  [[nodiscard]] bool must_go_on() const {
    constexpr std::uint64_t kHopeless = 60'000;
    const bool has_more = stage_ == Stage::kScores || stage_ == Stage::kListed;
    return !best_.plan && !scheduled_ && has_more && simulated_ < kHopeless;
  }
  // Whether the search among plans that only drop is worth finishing; whether its plan is the next.
  [[nodiscard]] bool has_dropping_left() const {
    return dropping_ && dropping_->found_or_online() && !dropping_->over_;
  }
  [[nodiscard]] bool only_drops_next();
  [[nodiscard]] bool may_shorten() const {
    return !moves() && stage_ != Stage::kListed && limits_.in_vain > 0;
  }
  [[nodiscard]] bool first_schedule_is_due() const;
  [[nodiscard]] bool costs_much(const PlanRef& plan) const;
  // See Note [A hybrid is never worse than dropping alone]
  [[nodiscard]] Until schedules_first() const;
  [[nodiscard]] Plan take_first();
  [[nodiscard]] const PlanRef& pend(Plan plan);
  // Puts what comes next into the queue. False if nothing does.
  [[nodiscard]] bool begin_next_stage();
  void try_what_is_kept();
  [[nodiscard]] Plan decided(const Found& best) const;
  [[nodiscard]] Plan changed();
  void note_found(const Found& found);
  // Puts the best plan so far into the queue, to be shortened, unless it was before.
  [[nodiscard]] bool try_shortened();
  [[nodiscard]] std::shared_ptr<const Schedule> shorten(const PlanRef& plan, Effort& effort) const;
  [[nodiscard]] const PlanRef& found_or_online() const;

  const std::shared_ptr<const Trace> trace_;
  const std::shared_ptr<const Future> future_;
  const std::size_t budget_;
  const std::optional<LinkOptions> link_;
  // See Note [A hybrid is never worse than dropping alone]
  std::unique_ptr<Search> dropping_;
  bool only_drops_ = false;  // is that one
  SearchLimits limits_;
  Policy policy_;  // of the level
  bool online_is_due_ = false;
  PlanRef carried_over_;  // to be compared with what is found
  PlanRef scheduled_;  // the best that is carried out, beside the sequence
  PlanRef shortened_;  // the last plan without a schedule whose run was shortened
  // See Note [Replays that hindsight spares], 3
  bool lacks_room_ = false;  // what was made of it last
  std::size_t spared_ = 0;   // of the budget
  int times_spared_ = 0;
  std::uint32_t exchanges_ = 0;  // the runs of schedules that were shortened, too
  std::uint64_t exchanged_in_vain_ = 0;  // operators, since they last gained
  std::shared_ptr<const Plan> online_;  // if that fits, and was as good as what was found before
  Stage stage_ = Stage::kListed;
  std::deque<Plan> queue_;
  PlanRef pending_;  // is being simulated, or to be
  bool over_ = false;
  std::uint64_t simulated_ = 0;  // but for schedules
  std::uint64_t shortening_ = 0;
  int simulated_plans_ = 0;
  std::uint64_t last_gain_ = 0;
  double gained_ = kNever;  // the overhead then
  Found best_;
  std::shared_ptr<const Plan> found_;  // the first that is as good
  std::shared_ptr<const Plan> general_;  // the same, of settings alone
  std::array<Found, kPreferences> best_of_;  // by what plans prefer
  std::optional<PlanChanges> changes_;  // for local search
};

}  // namespace rematfn
