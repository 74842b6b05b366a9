// SPDX-License-Identifier: Apache-2.0
//
// ledger.h: where each version is, and what it weighs.
//
// Note [The ledger alone moves a version]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A version belongs to the table of a level or to none; its bytes are here, leaving, away or coming. What
// depends on that is much: bytes that count in its table and all around it, those that could go, the list of
// candidates, the scores of what lies around it, what observers are told. So nobody writes a version's
// place or a table's bytes but the transitions below. Each says where it begins, and asserts that:
// docs/design/states.md has them all.

#pragma once

#include <atomic>
#include <compare>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <vector>

#include <c10/util/FunctionRef.h>

#include "engine/drop.h"
#include "engine/neighbourhood.h"
#include "engine/observers.h"
#include "engine/store.h"
#include "engine/table.h"
#include "engine/walk.h"
#include "policy/floor.h"

namespace rematfn {

class Ledger {
 public:
  explicit Ledger(Store& bytes) : store(bytes) {}
  virtual ~Ledger() = default;
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  // ---- the program ----------------------------------------------------------------------------------
  double clock = 0;  // See Note [Staleness is counted in program time]
  double copying = 0;  // seconds that copies have taken so far on links that slow operators down
  std::uint64_t next_order = 1;
  std::size_t live_operations = 0;
  Table* root = nullptr;  // the outermost level
  Observers observers;
  std::shared_ptr<const Trace> known;  // of an earlier call that was alike
  Thrash thrash;
  // See Note [Whoever needs room may take it]
  std::vector<Table*> sharing;      // tables whose budget others share
  std::atomic<bool> lends{false};   // the lock's owner waits
  const Ledger* giving_to = nullptr;  // for whom something is evicted just now; itself perhaps
  // Seconds of replays and of waiting, so far.
  [[nodiscard]] double spent() const { return thrash.replayed() + root->statistics.waited; }
  // Whether there is a guide that moves scores.
  [[nodiscard]] bool foresees() const { return observers.guide && observers.guide->foresees(); }
  // What next uses are compared with. See Note [A guided call keeps its record's time]
  [[nodiscard]] double record_clock() const { return observers.guide ? observers.guide->now() : clock; }
  // The plan does not suit this call, which differs from its record: it costs too much.
  void give_up_plan();
  // The program has run an operator: it is written down, or compared with what was foreseen.
  void note_call(const ObservedCall& call);
  void for_each_table(c10::function_ref<void(Table&)> visit) const;

  // trimming.cpp
  static constexpr std::size_t kMostOperations = std::size_t{1} << 18;
  void limit_operations(std::size_t most) { most_operations_ = trims_beyond_ = most; }
  // The program has run an operator: the record may be too long.
  void trim_if_long();

  Store& store;
  Drop drop_and_replay{store};
  Walks walks;
  Neighbourhood neighbourhood{walks};

  // ---- candidates -----------------------------------------------------------------------------------
  // Whether tables list what may go; they do from the first time that something has to.
  [[nodiscard]] bool lists_candidates() const { return lists_candidates_; }
  void list_candidates();
  void enlist(Version& version);
  void delist(Version& version);
  // Its nature has changed, and with it the ways that it may go by.
  void relist(Version& version);
  // A candidate that may go: it is considered along with the batch, if there is one.
  void offer(Version& version);
  // The program marks `version`, which belongs to a table.
  void mark(Version& version, std::string_view name);
  // Candidates of tables that leave early, until it is decided whether they go.
  Recent recent;
  // When such a one is due to go, in program time; never, if it goes by no way that keeps a copy.
  [[nodiscard]] double due_to_go(const Version& version);
  // The ways of its table and those around it, by which `version` may go.
  void for_each_way(const Version& version, c10::function_ref<void(Way&)> visit);
  // The cheapest of those that count; or null.
  [[nodiscard]] Way* cheapest_way(const Version& version, c10::function_ref<bool(const Way&)> counts);
  // What has a copy in memory. See Note [A copy may stay in memory].
  [[nodiscard]] const std::vector<Version*>& packed() const { return packed_; }
  // What frees the memory of its copy at the least cost: to drop it, or a way that takes it over; or null.
  [[nodiscard]] Way* relief_of(const Version& version);
  // The bytes of those in `table` that have one.
  [[nodiscard]] std::size_t relievable_bytes(const Table& table);

  // ---- transitions ----------------------------------------------------------------------------------
  // The version's bytes count in `table` from now on. It must not belong to one yet.
  void admit(Table& table, Version& version);
  void expel(Version& version);
  // What is here or away becomes `heir`'s, with its copy.
  void transfer(Version& version, Table& heir);
  void start_leaving(Version& version, Way& way);
  void stay(Version& version);
  // `version` has lost its bytes; it stays as lineage. `way`: that has a copy by now, of what was here.
  void lose_bytes(Version& version, Journal::What how, Way* way = nullptr);
  // It counts from now on. Once its copy is under way, await() says so.
  void start_coming(Version& version);
  void await(Version& version) { coming_.push_back(&version); }
  // It is away, as it was. `again`: it may come later.
  void stop_coming(Version& version, bool again);
  void arrive_by_copy(Version& version);
  void arrive(Version& version);
  // Its copy is `way`'s by now, and takes up no memory.
  void hand_over(Version& version, Way& way);
  // Nobody asks for the copy any more. What was leaving stays, and what was coming is there as it is.
  void discard_copy(Version& version);
  // `version` becomes a constant: it keeps its bytes and forgets how it was made. `trimmed`: since the record
  // was too long.
  void cut(Version& version, bool trimmed = false);
  // The program has no tensor on it any more: without a budget it would have been freed by now.
  void lose_tensor(Version& version);
  // A version is about to become a result of the outermost level's. Between the next two, results go on
  // counting when they leave.
  void note_result(const Version& version);
  void begin_handing_out() { root->hands_out_ = true; }
  void end_handing_out();
  void expect_results(std::size_t nbytes) { root->results_ahead_ = nbytes; }
  // So many bytes of `table` are now alive beside operators. True if that is news.
  bool note_unrecorded(Table& table, std::size_t nbytes);
  // What a snapshot was made of counts in `table` until it is overwritten.
  void charge_original(Table& table, std::size_t nbytes);
  void discharge_original(Table& table, std::size_t nbytes);
  // Somebody outside may read or fill `version` by address, beyond the next operator; or a collective may, or
  // has been waited for.
  void note_addressed(Version& version);
  void note_communicated(Version& version, bool communicated);

  // ---- a budget that others share -------------------------------------------------------------------
  void join(Table& table, std::shared_ptr<SharedBudget> budget);
  void leave_shared(Table& table);
  // That `nbytes` more may be allocated, if they fit. Replaces the claim before.
  [[nodiscard]] bool claim(Table& table, std::size_t nbytes);

  // ---- what is under way ----------------------------------------------------------------------------
  [[nodiscard]] bool is_moving() const { return !leaving_.empty() || !coming_.empty(); }
  [[nodiscard]] const std::deque<Version*>& leaving() const { return leaving_; }  // the first to leave first
  [[nodiscard]] const std::deque<Version*>& coming() const { return coming_; }
  // Of what has a copy and is away, what is read next; or null.
  [[nodiscard]] Version* read_next() const {
    return expected_.empty() ? nullptr : expected_.begin()->version;
  }

 private:
  struct TrimGoal;
  void trim(Table& table, TrimGoal& goal);
  // What the guide has said: of values, by its plan; and when they are read.
  void forget_plan();
  void forget_next_uses();
  void charge(Table& table, std::size_t nbytes);
  void discharge(Table& table, std::size_t nbytes);
  // What it has a copy of here is to count.
  void note_copy(Version& version);
  void discharge_copy(Version& version);
  void stop_moving(Version& version);
  void expect_use(Version& version);
  void be_here(Version& version);

  // When a version is read next. Those that one operator reads come in the order of their values, and
  // not of their addresses: a plan costs what it costs in whatever process it is simulated.
  struct Use {
    explicit Use(Version& read) : when(read.next_use), value(read.value), version(&read) {}
    auto operator<=>(const Use& other) const = default;

    double when;
    Trace::Id value;
    Version* version;
  };

  std::size_t most_operations_ = kMostOperations;
  std::size_t trims_beyond_ = kMostOperations;  // the record is too long from so many live operations on
  bool lists_candidates_ = false;
  std::deque<Version*> leaving_;
  std::deque<Version*> coming_;
  std::vector<Version*> packed_;
  std::set<Use> expected_;
};

void pin(Version& version);
void unpin(Version& version);
// For a scope.
class Pinned {
 public:
  explicit Pinned(Version& version) : version_(version) { pin(version); }
  ~Pinned() { unpin(version_); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

 private:
  Version& version_;
};
void expect(Version& version);  // one more pending reader
void unexpect(Version& version);
// The program reads or makes `version`.
void touch(Version& version, double now);

}  // namespace rematfn
