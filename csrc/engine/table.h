// SPDX-License-Identifier: Apache-2.0
//
// table.h: the versions of a level, and how many bytes they hold together.
//
// Note [What a call would have held]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A fraction is one of the peak that the call has without a budget, and most calls have one. So beside
// the bytes that are resident a table counts those that would be, were nothing ever evicted: of each
// version from when it is made until the program drops it, writes over it or takes it away, evicted
// or not. What replays make for a while does not count. With what the running operator allocates, and
// the bytes beside operators, the highest such sum is the peak of the function itself, to the byte; a
// test compares the two. Snapshots are not in it, nor what a policy keeps although the program has
// dropped it.

#pragma once

#include <atomic>
#include <limits>
#include <memory>
#include <string_view>
#include <vector>

#include <c10/util/FunctionRef.h>

#include "engine/lineage.h"
#include "engine/report.h"
#include "engine/shared_budget.h"
#include "policy/policy.h"

namespace rematfn {

// Candidates among whom the next victims are: first those that were picked, the lowest first, then
// those that were offered since. Null where one has gone.
// See Note [Victims are chosen a batch at a time]
struct Batch {
  std::vector<Version*> versions;
  std::size_t picked = 0;  // how many of them
  std::size_t first_picked = 0;  // all before are null
  std::size_t first_offered = 0;
  std::size_t evictions_left = 0;  // after so many it is picked anew
  double limit = kNever;  // the lowest score that was not picked

  void add(Version& version);
  void remove(Version& version);
  void clear();
};

// Thrown when room cannot be made: what `table` would have to allow for, and what stands in the way.
struct NoRoom {
  Table* table = nullptr;
  std::size_t smallest_budget = 0;
  std::size_t unevictable = 0;  // resident bytes left when nothing more could go
  bool thrashing = false;   // replays evict each other's inputs without end; the bytes are a guess
};

inline constexpr std::size_t kNoBudget = std::numeric_limits<std::size_t>::max();

// A level's versions: which may go, and how many bytes they hold together.
class Table : public Node {
 public:
  Table(std::shared_ptr<Domain> domain, Table* enclosing, std::size_t budget, Policy policy);
  ~Table() override;

  const std::shared_ptr<Domain> domain;
  const std::shared_ptr<Report> report;
  const Ref<Table> enclosing;
  std::vector<Table*> inner;
  std::size_t budget;
  const Policy policy;
  const std::uint32_t depth;
  std::uint32_t number = 0;  // in the domain's journal
  // Of the unconstrained peak so far, if more than `budget` was: see note_peak(). None: zero.
  double fraction = 0;
  // What is not in use goes, by a way that keeps a copy, whether or not there is room. So does what is
  // inside. See Note [A version goes by a way], Rule 6
  bool leaves_early;
  // The budget is of a peak that was only estimated: it gives way to what an operator needs.
  bool is_estimate = false;
  bool is_estimate_unguided = false;  // the same from when the guide is lost
  ByteCount& resident_bytes;  // inner tables' included
  std::size_t unconstrained_bytes = 0;  // the same; see Note [What a call would have held]
  // As last taken notice of; inner tables' included. See Note [Bytes beside operators].
  ByteCount unrecorded_bytes;
  // Of results, of the outermost level: those that are to leave, as a guide knows, and those that have.
  ByteCount results_ahead;
  ByteCount results_left;
  // Of those, the ones that still count. See Note [Results count until the last is there]
  ByteCount results_waiting;
  std::size_t loose_bytes = 0;     // of candidates that are not pinned
  std::size_t leaving_bytes = 0;   // of what is leaving
  std::size_t coming_bytes = 0;    // of what comes before it is asked for
  std::size_t trimmed_bytes = 0;   // of what was trimmed and is resident; inner tables' included
  // See Note [A shared budget is a sum]. None if `budget` is this table's alone, or if a table around
  // it shares the same.
  std::shared_ptr<SharedBudget> shared;
  std::atomic<std::size_t> counted = 0;  // in its sum; others may read it
  double shared_time = 0;   // what its clock is ahead of the domain's
  Statistics& statistics;
  Version* oldest = nullptr;
  Version* newest = nullptr;

  std::vector<Candidate> candidates;
  std::vector<Version*> candidate_versions;  // in step with `candidates`
  Batch batch;

  // The version's bytes count here from now on. It must not belong to a table yet. `unconstrained`: whether
  // they would without a budget. See Note [What a call would have held].
  void admit(Version& version, bool unconstrained = true);
  void expel(Version& version);
  // The same in one, without loss of a copy: a version of this table becomes `heir`'s.
  void give(Version& version, Table& heir);
  // The program, or lineage, asks no more for what `version` contains, a version of this table.
  void let_go(Version& version);

  // A version of this table is about to become a result of the outermost level's.
  void note_result(const Version& version);
  // Of an outermost level: from now on results go on counting when they leave; none does any more.
  void begin_handing_out() { hands_out_ = true; }
  void end_handing_out();

  // The bytes of a version of this table come or go.
  void charge(std::size_t nbytes);
  void discharge(std::size_t nbytes);
  // The same for a version of this table that has been trimmed.
  void charge_trimmed(std::size_t nbytes);
  void discharge_trimmed(std::size_t nbytes);
  // The same for what a snapshot was made of, which is there until it is overwritten.
  void charge_original(std::size_t nbytes);
  void discharge_original(std::size_t nbytes);
  // Nothing of it is resident any more.
  virtual void emptied() {}
  // shared_budget.cpp
  void join(std::shared_ptr<SharedBudget> budget_of_many);
  void leave_shared();
  // That `nbytes` more may be allocated, if they fit. Replaces the claim before.
  [[nodiscard]] bool claim(std::size_t nbytes);
  // Only what is there counts in a sum.
  void settle() {
    if (shared && counted != own_bytes()) count(own_bytes());
  }
  // The budget, or what others that share it leave of it as things stand.
  [[nodiscard]] std::size_t available_bytes() const;
  // What counts against the budget.
  [[nodiscard]] std::size_t used_bytes() const { return own_bytes() + unrecorded_bytes; }
  [[nodiscard]] std::size_t own_bytes() const { return resident_bytes + results_waiting; }
  // Of what is leaving, inner tables' included.
  [[nodiscard]] std::size_t leaving() const;
  // What could go, is leaving or coming, inner tables' included; but for what somebody turns out to
  // hold.
  [[nodiscard]] std::size_t evictable_bytes() const;
  // `in_flight` bytes beyond the resident ones are in use, here and in the enclosing tables. A budget
  // that is a fraction rises with the peak that there would have been.
  void note_peak(std::size_t in_flight);
  // An operator needs `nbytes` of budget, and allocates `in_flight` of them. False if the budget
  // stays below. See Note [A fraction of what is not known yet]
  bool give_way(std::size_t nbytes, std::size_t in_flight);
  void note_need(std::size_t nbytes);

  // The program marks `version`, which is this table's.
  void mark(Version& version, std::string_view name);

  // Versions go by these ways, of this table and of those inside it. By default they are dropped. To be
  // said before there is any.
  void let_go_by(std::vector<Way*> ways);
  // Whether one of the ways of this table, or of one around it, keeps a copy.
  [[nodiscard]] bool has_copies() const { return has_copies_; }
  // The ways of this table and those around it, by which `version` may go.
  void for_each_way(const Version& version, c10::function_ref<void(Way&)> visit) const;
  void enlist(Version& version);
  void delist(Version& version);
  // Its nature has changed, and with it the ways that it may go by.
  void relist(Version& version);
  // A candidate that may go: it is considered along with the batch, if there is one.
  void offer(Version& version);
  void check() const;

 private:
  void count(std::size_t nbytes);
  [[nodiscard]] Way* cheapest_way(const Version& version) const;
  void raise_budget(double bytes);

  std::vector<Way*> ways_;
  bool has_copies_;
  bool hands_out_ = false;
};

// The candidate's score may have risen; or fallen, if `lower`. See Note [Stale scores are too low].
void make_stale(const Version& version, bool lower);
// Does `table` or one around it share `budget`? Then what is inside counts there.
[[nodiscard]] bool is_shared_around(const std::shared_ptr<SharedBudget>& budget,
                                    const Table* table);
// Whether `table` is `whole`, or lies inside of it.
[[nodiscard]] bool is_within(const Table* table, const Table& whole);
// What a candidate's score is multiplied by.
[[nodiscard]] double weight_of(const Version& version);

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
