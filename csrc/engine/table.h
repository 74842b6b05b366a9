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

// What of tables that leave early has been touched, until it is decided whether it goes.
struct Recent {
  std::vector<Version*> versions;
  double first_due = kNever;  // none of them is due before; program time

  // None that is never due.
  void add(Version& version, double due);
  void remove(Version& version);
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
  // `ledger`: the domain's own.
  Table(const std::shared_ptr<Domain>& domain, Ledger& ledger, Table* enclosing, std::size_t budget,
        Policy policy);
  ~Table() override;

  const std::shared_ptr<Domain> domain;
  Ledger& ledger;
  const std::shared_ptr<Report> report;
  const Ref<Table> enclosing;
  std::vector<Table*> inner;
  std::size_t budget;
  const Policy policy;
  const std::uint32_t depth;
  const bool is_bounded;  // it, or some table around it, has a budget
  // `budget` rises to this share of the unconstrained peak so far: see note_peak(). 0: it does not.
  double fraction = 0;
  // What is not in use goes, by a way that keeps a copy, whether or not there is room. So does what is
  // inside. See Note [A version goes by a way], Rule 6
  bool leaves_early;
  // The budget is of a peak that was only estimated: it gives way to what an operator needs.
  bool is_estimate = false;
  bool is_estimate_unguided = false;  // the same from when the guide is lost
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

  // What is resident, inner tables' included.
  [[nodiscard]] std::size_t resident_bytes() const { return resident_bytes_; }
  // Of results, of an outermost level: those that are to leave, as a guide knows, and those that have.
  [[nodiscard]] std::size_t results_ahead() const { return results_ahead_; }
  [[nodiscard]] std::size_t results_left() const { return results_left_; }
  // Nothing of it is resident any more.
  virtual void emptied() {}
  // What allocators have taken beyond what they were asked for: room is made for it as long as something can go.
  [[nodiscard]] virtual std::size_t rounded_up() const { return 0; }
  // Gives back memory that no operator made and that lineage alone holds. Whether there was any.
  virtual bool give_back_dropped() { return false; }
  // Only what is there counts in a sum.
  void settle() {
    if (shared && counted != own_bytes()) count(own_bytes());
  }
  // The budget, or what others that share it leave of it as things stand.
  [[nodiscard]] std::size_t available_bytes() const;
  // What counts against the budget.
  [[nodiscard]] std::size_t used_bytes() const { return own_bytes() + unrecorded_bytes_; }
  [[nodiscard]] std::size_t own_bytes() const { return resident_bytes_ + results_waiting_; }
  // Of what is leaving, and of what was trimmed and is resident; inner tables' included.
  [[nodiscard]] std::size_t leaving() const { return with_inner(&Table::leaving_bytes_); }
  [[nodiscard]] std::size_t trimmed() const { return with_inner(&Table::trimmed_bytes_); }
  // What could go, is leaving or coming, inner tables' included; but for what somebody turns out to
  // hold.
  [[nodiscard]] std::size_t evictable_bytes() const {
    return with_inner(&Table::loose_bytes_) + leaving() + with_inner(&Table::coming_bytes_);
  }
  // `in_flight` bytes beyond the resident ones are in use, here and in the enclosing tables. A budget
  // that is a fraction rises with the peak that there would have been.
  void note_peak(std::size_t in_flight);
  // An operator needs `nbytes` of budget, and allocates `in_flight` of them. False if the budget
  // stays below. See Note [A fraction of what is not known yet]
  bool give_way(std::size_t nbytes, std::size_t in_flight);
  void note_need(std::size_t nbytes);

  // Versions go by these ways, of this table and of those inside it. By default they are dropped. To be
  // said before there is any.
  void evict_by(std::vector<Way*> ways);
  // Whether one of the ways of this table, or of one around it, keeps a copy.
  [[nodiscard]] bool has_copies() const { return has_copies_; }
  void check() const;

 private:
  friend class Ledger;
  friend void pin(Version& version);
  friend void unpin(Version& version);

  [[nodiscard]] std::size_t with_inner(std::size_t Table::*nbytes) const;
  void link(Version& version);
  void unlink(Version& version);
  void count(std::size_t nbytes);
  // More, or (negated) less.
  void count_unconstrained(std::size_t nbytes) {
    for (Table* t = this; t != nullptr; t = t->enclosing.get()) t->unconstrained_bytes_ += nbytes;
  }
  void raise_budget(double bytes);

  ByteCount& resident_bytes_;
  std::size_t unconstrained_bytes_ = 0;  // inner tables' included; see Note [What a call would have held]
  // As last taken notice of; inner tables' included. See Note [Bytes beside operators].
  ByteCount unrecorded_bytes_;
  ByteCount results_ahead_;
  ByteCount results_left_;
  // Of those, the ones that still count. See Note [Results count until the last is there]
  ByteCount results_waiting_;
  std::size_t loose_bytes_ = 0;    // of candidates that are not pinned
  std::size_t leaving_bytes_ = 0;  // of what is leaving
  std::size_t coming_bytes_ = 0;   // of what comes before it is asked for
  std::size_t trimmed_bytes_ = 0;  // of what was trimmed, and is resident
  std::vector<Way*> ways_;  // none: they are dropped
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

}  // namespace rematfn
