// SPDX-License-Identifier: Apache-2.0
#include "engine/ledger.h"

#include <algorithm>
#include <utility>

#include "base/invariant.h"

namespace rematfn {

Version::~Version() {
  if (table) table->ledger.expel(*this);
  if (producer) {
    auto& outputs = producer->outputs;
    std::replace(outputs.begin(), outputs.end(), this, static_cast<Version*>(nullptr));
  }
}

Operation::~Operation() {
  for (Input& input : inputs) {
    (input.previous == nullptr ? input.version->readers : input.previous->next) = input.next;
    if (input.next != nullptr) input.next->previous = input.previous;
  }
  if (!table) return;
  --table->ledger.live_operations;
  if (call != kNoValue) table->ledger.observers.forget(*this);
}

// ---- the program ----------------------------------------------------------------------------------

void Ledger::note_call(const ObservedCall& call) {
  const Guide* guide = observers.guide.get();
  const bool was_dormant = guide != nullptr && guide->is_dormant();
  const Plan* const plan = guide != nullptr ? &guide->plan() : nullptr;
  observers.note_call(call, *root->report);
  const bool is_lost = guide != nullptr && guide->is_dormant() && !was_dormant;
  if (is_lost || (guide != nullptr && plan != &guide->plan())) [[unlikely]] {
    root->report->lost_at = call.name;
    forget_plan();
  }
  if (is_lost) [[unlikely]] forget_next_uses();
  // What has been written has other contents now, which are another value.
  for (const ObservedCall::Read& read : call.reads) {
    if (read.written && !read.version->table) read.version->value = read.version->recorded = kNoValue;
  }
}

void Ledger::give_up_plan() {
  observers.guide->give_up();
  forget_plan();
  forget_next_uses();
}

// See Note [A plan for calls that differ]
void Ledger::forget_plan() {
  for_each_table([&](Table& table) {
    for (Version* v = table.oldest; v != nullptr; v = v->next) {
      if (&table == root) v->kept = v->marked;  // the rest a plan has said
    }
    for (std::size_t k = 0; k < table.candidates.size(); ++k) {
      table.candidates[k].kept = table.candidate_versions[k]->kept;
    }
    table.batch.clear();
  });
}

// See Note [A guide finds its place again]
void Ledger::forget_next_uses() {
  expected_.clear();
  root->report->guide_lost = true;
  root->results_ahead_ = 0;
  root->is_estimate |= root->is_estimate_unguided;
  for_each_table([&](Table& table) {
    for (Version* v = table.oldest; v != nullptr; v = v->next) v->next_use = kUnknown;
    for (Candidate& c : table.candidates) {
      c.next_use = kUnknown;
      c.stale = true;
    }
  });
}

void Ledger::for_each_table(c10::function_ref<void(Table&)> visit) const {
  std::vector<Table*> tables{root};
  for (std::size_t i = 0; i < tables.size(); ++i) {
    visit(*tables[i]);
    tables.insert(tables.end(), tables[i]->inner.begin(), tables[i]->inner.end());
  }
}

void Ledger::note_addressed(Version& version) {
  if (std::exchange(version.addressed, true)) return;
  observers.note(Trace::What::kAddressed, version);
  relist(version);
}

void Ledger::note_communicated(Version& version, bool communicated) {
  if (std::exchange(version.communicated, communicated) != communicated) relist(version);
}

// ---- transitions: whose it is -----------------------------------------------------------------------

void Ledger::admit(Table& table, Version& version) {
  require_invariant(!version.table, "a version is of one table");
  table.link(version);
  if (version.has_tensor) [[likely]] table.count_unconstrained(version.nbytes);
  if (!version.has_bytes()) [[unlikely]] return;
  for (const Table* t = &table; t != nullptr && t->has_copies(); t = t->enclosing.get()) {
    for (const Way* way : t->ways_) {
      version.packed_share = std::min(version.packed_share, static_cast<float>(way->packed_share(version)));
    }
  }
  charge(table, version.nbytes);
  if (version.trimmed) [[unlikely]] table.trimmed_bytes_ += version.nbytes;
  enlist(version);
  observers.note_made(version);
}

void Ledger::lose_tensor(Version& version) {
  const bool had = std::exchange(version.has_tensor, false);
  if (had && version.table) [[likely]] version.table->count_unconstrained(-version.nbytes);
}

void Ledger::expel(Version& version) {
  Table& table = *version.table;
  delist(version);
  if (version.has_tensor) table.count_unconstrained(-version.nbytes);
  if (version.copied_by() != nullptr) [[unlikely]] discard_copy(version);
  if (version.has_bytes()) {
    discharge(table, version.nbytes);
    if (version.trimmed) table.trimmed_bytes_ -= version.nbytes;
    observers.note(version.references == 0 ? Journal::What::kReleased : Journal::What::kLeft, version);
  }
  table.unlink(version);
}

void Ledger::transfer(Version& version, Table& heir) {
  Way* const copied_by = std::exchange(version.copied_by_, nullptr);
  discharge_copy(version);
  expel(version);
  admit(heir, version);
  version.copied_by_ = copied_by;
  note_copy(version);
  charge(heir, version.packed_bytes);
}

void Ledger::charge_original(Table& table, std::size_t nbytes) {
  table.count_unconstrained(nbytes);
  charge(table, nbytes);
}

void Ledger::discharge_original(Table& table, std::size_t nbytes) {
  table.count_unconstrained(-nbytes);
  discharge(table, nbytes);
}

void Ledger::cut(Version& version, bool trimmed) {
  if (version.table) delist(version);
  auto& outputs = version.producer->outputs;
  std::replace(outputs.begin(), outputs.end(), &version, static_cast<Version*>(nullptr));
  if (version.has_bytes()) store.keep_alive(version);
  version.producer.reset();
  observers.note_cut(version);
  if (!version.table || !version.is_here()) return;
  enlist(version);
  if (!trimmed || version.is_candidate()) return;  // it can still be moved
  version.trimmed = true;
  version.table->trimmed_bytes_ += version.nbytes;
}

void Ledger::note_result(const Version& version) {
  root->results_left_ += version.nbytes;
  root->results_ahead_ -= std::min<std::size_t>(root->results_ahead_, version.nbytes);
  if (root->hands_out_) root->results_waiting_ += version.nbytes;
}

void Ledger::end_handing_out() {
  root->hands_out_ = false;
  root->results_waiting_ = 0;
}

bool Ledger::note_unrecorded(Table& table, std::size_t nbytes) {
  if (nbytes == table.unrecorded_bytes_) return false;
  table.unrecorded_bytes_ = nbytes;
  if (&table == root) observers.note_unrecorded(nbytes);
  return true;
}

// ---- a budget that others share ---------------------------------------------------------------------

void Ledger::join(Table& table, std::shared_ptr<SharedBudget> budget) {
  table.shared = std::move(budget);
  table.shared_time = table.shared->clock() - clock;
  sharing.push_back(&table);
  table.shared->enter(table);
}

void Ledger::leave_shared(Table& table) {
  std::erase(sharing, &table);
  table.count(0);
  table.shared->leave(table);
  table.shared.reset();
}

bool Ledger::claim(Table& table, std::size_t nbytes) {
  table.shared_time = table.shared->advance(clock + table.shared_time) - clock;
  const std::size_t wanted = table.own_bytes() + nbytes;
  if (!table.shared->claim(table.counted, wanted)) return false;
  table.counted = wanted;
  return true;
}

// ---- transitions: where its bytes are ---------------------------------------------------------------

void Ledger::charge(Table& table, std::size_t nbytes) {
  for (Table* t = &table; t != nullptr; t = t->enclosing.get()) {
    t->resident_bytes_ += nbytes;
    if (t->shared && t->own_bytes() > t->counted) [[unlikely]] t->count(t->own_bytes());
  }
  table.note_peak(0);
}

void Ledger::discharge(Table& table, std::size_t nbytes) {
  for (Table* t = &table; t != nullptr; t = t->enclosing.get()) {
    t->resident_bytes_ -= nbytes;
    if (t->shared && giving_to != nullptr) [[unlikely]] t->count(t->counted - nbytes);
    if (t->resident_bytes_ == 0) [[unlikely]] t->emptied();
  }
}

// Note [A copy may stay in memory]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// What is packed is away, and its copy takes up fewer bytes in the memory that the budget is of. They count in
// its table, and all around it, from when it has gone until it has come back: while it comes, beside its own.
// Where nothing else can go, it has to: it is written to a disk, if there is one, or dropped, if the version can
// be replayed and no queued replay is to read it. So a budget in which a program runs by a disk, or by replays,
// is not too small because values were packed.
void Ledger::note_copy(Version& version) {
  if (version.copied_by() == nullptr) [[likely]] return;
  version.packed_bytes = version.copied_by()->bytes_here(version);
  if (!version.is_packed()) return;
  version.packed_share = static_cast<float>(version.packed_bytes) / static_cast<float>(version.nbytes);
  observers.note_packed(version);
  packed_.push_back(&version);
}

void Ledger::discharge_copy(Version& version) {
  if (!version.is_packed()) return;
  std::erase(packed_, &version);
  discharge(*version.table, std::exchange(version.packed_bytes, 0));
}

Way* Ledger::relief_of(const Version& version) {
  if (version.place() != Place::kAway) return nullptr;
  return cheapest_way(version, [&](const Way& way) {
    return way.keeps_copy() ? way.takes_copies(version) : version.pending == 0;
  });
}

std::size_t Ledger::relievable_bytes(const Table& table) {
  std::size_t sum = 0;
  for (const Version* v : packed_) {
    if (is_within(v->table.get(), table) && relief_of(*v) != nullptr) sum += v->packed_bytes;
  }
  return sum;
}

void Ledger::be_here(Version& version) {
  version.place_ = Place::kHere;
  enlist(version);
}

void Ledger::stop_moving(Version& version) {
  const bool is_leaving = version.place() == Place::kLeaving;
  auto& moving = is_leaving ? leaving_ : coming_;
  if (const auto at = std::ranges::find(moving, &version); at != moving.end()) moving.erase(at);
  (is_leaving ? version.table->leaving_bytes_ : version.table->coming_bytes_) -= version.nbytes;
}

void Ledger::start_leaving(Version& version, Way& way) {
  require_invariant(version.is_here(), "what leaves is here");
  delist(version);
  version.table->leaving_bytes_ += version.nbytes;
  version.place_ = Place::kLeaving;
  version.copied_by_ = &way;
  leaving_.push_back(&version);
}

void Ledger::stay(Version& version) {
  require_invariant(version.place() == Place::kLeaving, "what stays after all was leaving");
  stop_moving(version);
  version.copied_by_ = nullptr;
  be_here(version);
}

void Ledger::lose_bytes(Version& version, Journal::What how, Way* way) {
  require_invariant(version.is_readable(), "what loses its bytes has them");
  if (way != nullptr) [[unlikely]] version.copied_by_ = way;
  if (version.place() == Place::kLeaving) [[unlikely]] stop_moving(version);
  Table& table = *version.table;
  delist(version);
  note_copy(version);
  discharge(table, version.nbytes - std::min(version.nbytes, version.packed_bytes));
  if (version.packed_bytes > version.nbytes) [[unlikely]] charge(table, version.packed_bytes - version.nbytes);
  observers.note(how, version);
  if (std::exchange(version.trimmed, false)) [[unlikely]] table.trimmed_bytes_ -= version.nbytes;
  version.place_ = Place::kAway;
  expect_use(version);
  neighbourhood.note_change(version, /*came_back=*/false, foresees());
}

// What has a copy and is away.
void Ledger::expect_use(Version& version) {
  const bool is_known = version.next_use != kUnknown && version.next_use != kNever;
  if (version.copied_by() != nullptr && is_known) [[unlikely]] expected_.insert(Use(version));
}

void Ledger::start_coming(Version& version) {
  require_invariant(version.can_be_fetched(), "what comes is away, and has a copy");
  expected_.erase(Use(version));
  version.place_ = Place::kComing;
  version.table->coming_bytes_ += version.nbytes;
  charge(*version.table, version.nbytes);
}

void Ledger::stop_coming(Version& version, bool again) {
  require_invariant(version.place() == Place::kComing, "what does not come after all was coming");
  stop_moving(version);
  version.place_ = Place::kAway;
  discharge(*version.table, version.nbytes);
  if (again) expect_use(version);
}

void Ledger::arrive_by_copy(Version& version) {
  require_invariant(version.place() == Place::kComing, "what has come by its copy was coming");
  stop_moving(version);
  version.copied_by_ = nullptr;
  discharge_copy(version);
  if (!version.producer && version.readers != nullptr) store.keep_alive(version);
  be_here(version);
  neighbourhood.note_change(version, /*came_back=*/true, foresees());
}

void Ledger::arrive(Version& version) {
  require_invariant(version.must_be_replayed(), "what is replayed is away, and has no copy");
  version.raw = false;  // See Note [Uninitialised memory is kept]
  charge(*version.table, version.nbytes);
  be_here(version);
  observers.note(Journal::What::kReplayed, version);
  neighbourhood.note_change(version, /*came_back=*/true, foresees());
}

void Ledger::hand_over(Version& version, Way& way) {
  require_invariant(version.can_be_fetched(), "what is handed over is away, and has a copy");
  discharge_copy(version);
  version.copied_by_ = &way;
  observers.note_move(version);
}

void Ledger::discard_copy(Version& version) {
  if (version.place() == Place::kLeaving || version.place() == Place::kComing) {
    stop_moving(version);
    version.place_ = Place::kHere;
  } else if (version.place() == Place::kAway) {
    expected_.erase(Use(version));
    observers.note(Journal::What::kForgotten, version);
  }
  discharge_copy(version);
  std::exchange(version.copied_by_, nullptr)->discard(version);
}

}  // namespace rematfn
