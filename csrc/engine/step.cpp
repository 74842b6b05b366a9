// SPDX-License-Identifier: Apache-2.0
#include "engine/step.h"

#include <algorithm>
#include <vector>

#include "engine/domain.h"

namespace rematfn {

Step::Step(Domain& domain, Table& level)
    : is_bounded_(level.is_bounded),
      is_metered_(is_bounded_ || domain.observers.see_needs()),
      domain_(domain),
      level_(level) {}

void Step::run() {
  domain_.thrash.enter(nature_.backward);
  domain_.clock += domain_.observers.note_next();
  before_ = domain_.clock;
  if (Journal* const journal = domain_.observers.journal.get()) [[unlikely]] {
    journal->begin(operator_name(), site(), nature_.backward);
  }
  if (is_metered_) {
    need_ = foresee();
    granted_ = need_.likely_bytes;
    require_room();
  }
  prepare();
  is_recorded_ = nature_.replayable && (nature_.makes_fresh || overwrites_only_replayable());
  try {
    if (writes_) save_what_is_overwritten();
    bring_back();
    if (is_recorded_) [[likely]] {
      operation_ = make_operation();
      operation_->table = Ref<Table>(&level_);
      operation_->order = domain_.next_order++;
      ++domain_.live_operations;
      operation_->inputs.reserve(inputs_);
      take_inputs();
    }
    if (is_bounded_) make_room();
    run_kernel();
    take_results();
  } catch (...) {
    abandon_writes();
    if (seen_) domain_.note_call(*seen_);
    throw;
  }
  if (seen_) domain_.note_call(*seen_);
}

void Step::finish() {
  unpin_all();
  if (seen_ && domain_.observers.schedule() != nullptr) evict_spent();
  domain_.trim_if_long();
  if (domain_.is_moving()) domain_.note_arrivals();
  if (is_bounded_) domain_.make_room(level_, 0);
  for (Table* t = &level_; t != nullptr; t = t->enclosing.get()) {
    if (t->policy.evict_everything) [[unlikely]] domain_.evictor.evict_all(*t);
  }
  if (level_.has_copies()) [[unlikely]] leave_early();
}

// See Note [A version goes by a way], Rule 6
void Step::leave_early() {
  if (level_.leaves_early) domain_.evictor.evict_untouched(before_);
  if (!domain_.foresees()) return;
  if (seen_) {
    for (const ObservedCall::Read& read : seen_->reads) domain_.evictor.evict_early(*read.version);
  }
  domain_.fetch_ahead();
}

// See Note [A schedule is carried out], 2
void Step::evict_spent() {
  const auto spent = domain_.observers.guide->spent();
  const auto evict = [&](Version& version) {
    if (std::ranges::find(spent, version.value) != spent.end()) domain_.evictor.evict_if_free(version);
  };
  for (const ObservedCall::Read& read : seen_->reads) evict(*read.version);
  for (const ObservedCall::Made& made : seen_->makes) evict(*made.version);
}

// See Note [Before, not after]
void Step::require_room() {
  inputs_in_.clear();
  for (Table* t = &level_; t != nullptr; t = t->enclosing.get()) {
    const std::size_t inputs = inputs_in_.emplace_back(input_bytes_in(*t));
    const std::size_t needed = inputs + need_.certain_bytes;
    note_need(*t, needed);
    if (!t->enclosing && domain_.observers.journal) [[unlikely]] domain_.observers.journal->note_need(needed);
    if (needed > t->budget && !t->give_way(needed, granted_)) [[unlikely]] throw NoRoom{t, needed, inputs};
  }
}

void Step::note_need(Table& table, std::size_t nbytes) const {
  if (nbytes <= table.statistics.min_budget) [[likely]] return;
  table.statistics.min_budget = nbytes;
  table.report->neediest = operator_name();
}

std::size_t Step::input_bytes_in(const Table& table) const {
  std::size_t sum = 0;
  for (const Operand* operand = operands_.begin(); operand != operands_.end(); ++operand) {
    if (operand->version == nullptr || !is_within(operand->version->table.get(), table)) continue;
    const bool counted_before =
        std::any_of(operands_.begin(), operand,
                    [&](const Operand& o) { return o.version == operand->version; });
    if (!counted_before) sum += operand->version->nbytes;
  }
  return sum;
}

// See Note [Statistics are written aside]
void Step::count_inputs() {
  inputs_ = operands_.size();
  if (!nature_.writes_aside) [[likely]] return;
  const auto is_aside = [](const Operand& operand) {
    return operand.written && (operand.version == nullptr || !operand.version->table);
  };
  std::size_t left = inputs_;
  while (left > 0 && is_aside(operands_[left - 1])) --left;
  for (std::size_t i = 0; i < left; ++i) {
    if (operands_[i].written) return;
    for (std::size_t k = left; k < inputs_; ++k) {
      if (are_on_one_storage(i, k)) return;
    }
  }
  inputs_ = left;
}

// See Note [Mutation is a new version]
bool Step::overwrites_only_replayable() const {
  const auto is_lost = [](const Operand& operand) {
    const bool has_producer = operand.version != nullptr && operand.version->producer;
    return operand.written && !has_producer;
  };
  return writes_ && std::ranges::none_of(operands_, is_lost);
}

// See Note [Mutation is a new version]
void Step::save_what_is_overwritten() {
  for (std::size_t i = 0; i < operands_.size(); ++i) {
    if (!operands_[i].written) continue;
    const Ref<Version> version = find_overwritten(i);
    if (!version) continue;
    if (operands_[i].version == nullptr) overwritten_.emplace_back(i, version);
    if (version->producer || is_saved(*version)) continue;
    const bool is_needed = is_recorded_ ? i < inputs_ || version->readers != nullptr
                                        : !domain_.free_of_readers(*version, level_);
    if (!is_needed) {
      note_not_copied(i);
      continue;
    }
    Table* const home = domain_.snapshot(*version, level_);
    pin_for_step(*version);
    saved_.push_back({version.get(), i, home});
  }
}

bool Step::is_saved(const Version& version) const {
  return std::ranges::find(saved_, &version, &Saved::version) != saved_.end();
}

// What was saved and then not written lies there twice.
void Step::abandon_writes() {
  for (std::size_t i = 0; i < saved_.size(); ++i) {
    if (saved_[i].home == nullptr) continue;
    observe_failure();
    note_not_written(saved_[i].operand);
    discharge_original(*saved_[i].version);
  }
}

// New contents are about to count in its place.
void Step::discharge_original(const Version& version) {
  const auto saved = std::ranges::find(saved_, &version, &Saved::version);
  if (saved == saved_.end()) return;
  if (Table* const home = std::exchange(saved->home, nullptr)) domain_.discharge_original(*home, version.nbytes);
}

void Step::bring_back() {
  bool is_missing = false;
  for (const Operand& operand : operands_) {
    if (operand.home == nullptr) continue;
    if (operand.version->place() == Place::kComing) [[unlikely]] domain_.let_come(*operand.version);
    is_missing |= !operand.version->is_here();
  }
  if (level_.enclosing && domain_.observers.guide) [[unlikely]] domain_.observers.guide->leave_schedule();
  if (is_missing || domain_.observers.has_replays_due()) [[unlikely]] {
    std::vector<Version*> wanted;
    for (const Operand& operand : operands_) {
      if (operand.home != nullptr) wanted.push_back(operand.version);
    }
    domain_.materialize(wanted, /*before_call=*/true);
  }
  for (const Operand& operand : operands_) {
    if (operand.home != nullptr) pin_for_step(*operand.version);
  }
}

void Step::unpin_all() {
  for (const Ref<Version>& version : pinned_) unpin(*version);
  pinned_.clear();
}

// See Note [What one call teaches decides no other]
void Step::make_room() {
  if (granted_ > need_.certain_bytes) {
    if (domain_.could_make_room(level_, granted_)) {
      try {
        return domain_.make_room(level_, granted_);
      } catch (const NoRoom&) {
        // what could have gone turned out to be held
      }
    }
    granted_ = need_.certain_bytes;
  }
  domain_.make_room(level_, granted_);
}

void Step::account(const CallFacts& taken, std::size_t peak_bytes) {
  level_.note_peak(peak_bytes);
  const std::size_t* inputs = inputs_in_.begin();
  for (Table* t = &level_; is_metered_ && t != nullptr; t = t->enclosing.get()) note_need(*t, *inputs++ + peak_bytes);
  // See Note [A guided call keeps its record's time]
  Observers& observers = domain_.observers;
  const double cost = observers.note_taken(taken.cost, taken.output_bytes, domain_.spent(), domain_.copying);
  domain_.clock += cost;
  domain_.thrash.note_operator(cost);
  if (operation_) [[likely]] {
    operation_->cost = cost;
    operation_->flops = taken.flops;
    operation_->output_bytes = taken.output_bytes;
    operation_->scratch_bytes = taken.scratch_bytes;
  }
  if (observers.journal) [[unlikely]] observers.journal->note_need(inputs_in_.back() + peak_bytes);
  observers.note_run(level_, cost, taken.flops, peak_bytes);
  if (observers.see_calls()) observe(taken);
  for (const Operand& operand : operands_) {
    if (operand.home == nullptr) continue;
    operand.version->consumed = true;
    touch(*operand.version, domain_.clock);
  }
}

// What the operator reads or overwrites, if that is to be written down: null if it neither counts nor is
// replayed from. Which operators are recorded differs from call to call.
Ref<Version> Step::observed(std::size_t operand) {
  if (operation_ && operand < operation_->inputs.size()) [[likely]] return operation_->inputs[operand].version;
  if (operands_[operand].version != nullptr) return Ref<Version>(operands_[operand].version);
  const auto found = std::ranges::find(overwritten_, operand, [](const auto& o) { return o.first; });
  if (found != overwritten_.end()) return found->second;
  return nature_.replayable ? find_outside(operand) : Ref<Version>();
}

// What was read is taken down before writes put other versions in its place.
void Step::observe(const CallFacts& taken) {
  seen_.emplace(operator_name(), taken);
  seen_->replayable = nature_.replayable;
  seen_->raw = nature_.raw;
  seen_->backward = nature_.backward;
  read_of_.assign(operands_.size(), -1);
  for (std::size_t i = 0; i < operands_.size(); ++i) {
    Ref<Version> version = observed(i);
    if (!version) continue;
    read_of_[i] = static_cast<std::int32_t>(seen_->reads.size());
    seen_->reads.push_back({std::move(version), operands_[i].written});
  }
}

void Step::observe_failure() {
  if (seen_ || !domain_.observers.see_calls()) return;
  observe({});
  seen_->replayable = false;
}

bool Step::begin(Version& contents, std::int32_t over) {
  contents.last_access = domain_.clock;
  contents.raw = nature_.raw && over == kFresh;
  contents.backward = nature_.backward;
  contents.communicated = nature_.communicated;
  contents.kept = level_.policy.keeping.unmarked(nature_.work, nature_.backward);
  if (over == kFresh) [[likely]] return static_cast<bool>(operation_);
  Version& old = *operands_[over].version;
  contents.consumed = old.consumed;
  contents.addressed |= old.addressed;  // the bytes lie where they lay
  contents.communicated |= old.communicated;
  contents.kept |= old.kept && level_.policy.keeping.written();
  const bool was_replayable = old.producer || is_saved(old);
  if (!is_saved(old)) {  // and lives on as lineage, if at all
    domain_.lose_tensor(old);
    domain_.store.overwritten(old);
    domain_.note_gone(old);
  } else {
    discharge_original(old);
  }
  // Made again it might lie elsewhere.
  return operation_ && was_replayable && !old.is_addressed();
}

void Step::admit(const Ref<Version>& contents, std::int32_t over) {
  if (over == kFresh) [[likely]] {
    domain_.admit(level_, *contents);
  } else {
    Table* home = operands_[over].home;
    domain_.admit(home != nullptr ? *home : level_, *contents);
    pin_for_step(*contents);
  }
  if (seen_) seen_->makes.push_back({contents, over == kFresh ? kFresh : read_of_[over]});
}

}  // namespace rematfn
