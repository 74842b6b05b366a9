// SPDX-License-Identifier: Apache-2.0
//
// domain.h: a tree of nested levels that share one lineage, one clock and one lock.
//
// A domain decides: what to evict to make room, what to replay to have a version again. Each part of
// that is a class of its own, with its own state. What doing so means for bytes, its Store knows, and
// how a version goes and comes back, the Ways of its tables.
//
// Note [The program may drop a tensor at any time]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A tensor may die on any thread, in the middle of an operator, while its thread holds Python's
// lock. Waiting for the domain's lock there could deadlock with an operator that waits for Python's,
// and changing the table there would pull it away from under the code that walks it. So if the lock
// is not free, release() only queues the version, for whoever holds the lock to bury as it lets go.
// Until then nothing has changed for the thread that holds the lock. The version's bytes are in the
// queue with it, so that they are still there; its cell still exists, although no tensor of the
// program refers to it any more.
//
// Note [A fork loses the domains of other threads]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A forked child has one thread. What another thread of the parent held locked stays locked in the
// child for good, and what it was about to change stays half changed. To wait for all locks before a
// fork would be to wait for kernels, which may wait for the interpreter, which the forking thread
// holds. So a domain that is busy on another thread at that moment is lost to the child: its tensors
// may be dropped there, and using them is an error. All others go on.

#pragma once

#include <atomic>
#include <compare>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <vector>

#include "base/queue_lock.h"
#include "base/thread_local.h"
#include "engine/burial.h"
#include "engine/drop.h"
#include "engine/evictor.h"
#include "engine/journal.h"
#include "engine/table.h"
#include "engine/neighbourhood.h"
#include "engine/replayer.h"
#include "engine/store.h"
#include "engine/trace.h"
#include "engine/trimmer.h"
#include "engine/walk.h"
#include "policy/floor.h"

namespace rematfn {

class Guide;

class Domain : public std::enable_shared_from_this<Domain> {
 public:
  explicit Domain(Store& store);
  virtual ~Domain() = default;

  double clock = 0;  // See Note [Staleness is counted in program time]
  double copying = 0;  // seconds of copies beside which operators take longer, as their links have it
  std::uint64_t next_order = 1;
  std::size_t live_operations = 0;
  Table* root = nullptr;  // the outermost level
  // At most one of the two.
  std::unique_ptr<Recorder> recorder;
  std::shared_ptr<Guide> guide;
  std::shared_ptr<const Trace> known;  // of an earlier call that was alike
  std::shared_ptr<Journal> journal;    // null: nobody asks
  bool guide_lost = false;
  // See Note [Whoever needs room may take it]
  std::vector<Table*> sharing;      // tables whose budget others share
  std::atomic<bool> lends{false};   // the lock's owner waits
  const Domain* giving_to = nullptr;  // for whom something is evicted just now; itself perhaps
  // Seconds of replays and of waiting, so far.
  [[nodiscard]] double spent() const;
  // Whether there is one that moves scores.
  [[nodiscard]] bool foresees() const;

  Store& store;
  Drop drop_and_replay{store};
  Walks walks;
  Thrash thrash;
  FloorRules floor;
  Neighbourhood neighbourhood{walks};
  Evictor evictor{*this};
  Replayer replayer{*this};
  Burial burial{*this};
  Trimmer trimmer{*this};

  // Whether tables list what may go; they do from the first time that something has to.
  [[nodiscard]] bool lists_candidates() const { return lists_candidates_; }
  void list_candidates();
  // Evicts until `table` and every table around it can hold `nbytes` more. Throws NoRoom.
  void make_room(Table& table, std::size_t nbytes);
  // Whether it looks as if it can.
  [[nodiscard]] bool could_make_room(const Table& table, std::size_t nbytes);
  // An allocation of about `nbytes` failed: evicts about twice as much from all levels. False if
  // nothing could go.
  bool evict_after_failure(std::size_t nbytes);
  // Evicts about so much of `table`, as far as it can, and waits until it has gone. Returns how much has.
  std::size_t evict_bytes(Table& table, std::size_t nbytes);
  // Makes all of `wanted` resident at once. Throws NoRoom.
  void materialize(std::span<Version* const> wanted) { replayer.materialize(wanted); }

  // A candidate goes, by its way.
  void evict(Version& version);
  // One that can be replayed is of no use now.
  void drop(Version& version);
  // `version` has lost its bytes; it stays as lineage.
  void leave(Version& version);
  // `version` has been replayed: it has its bytes again.
  void arrive(Version& version);
  // The bytes of `version`, for which there is room, come from its copy. If that is lost, `version` is to
  // be replayed, or this throws.
  void fetch(Version& version);
  // The same; what takes its time is coming then.
  void begin_to_fetch(Version& version);
  // `version` is leaving, and stays.
  void call_back(Version& version);
  // `version` is coming, and goes back.
  void turn_back(Version& version);
  // `version` is coming: waits for it. If its copy is lost: as fetch(), but throws only if it is `wanted`.
  void let_come(Version& version, bool wanted = true);
  // Whether something is under way.
  [[nodiscard]] bool is_moving() const { return !leaving_.empty() || !coming_.empty(); }
  // Takes note of what has arrived by now.
  void note_arrivals();
  // Begins to fetch what will be read soon, as far as there is room that nothing needs before. What will
  // never be read goes for it.
  void fetch_ahead();
  // What is leaving `table`, or one inside it, has gone when this returns; what was coming goes back.
  void end_moves(const Table& table);
  // Nobody asks for the copy any more.
  void discard_copy(Version& version);
  // Keeps a copy of a constant or outside version that is about to be overwritten, as `level`'s. Returns
  // the table in which the original counts from then on, until that is told otherwise; null if nowhere.
  Table* snapshot(Version& version, Table& level);
  // overwriting.cpp. A constant or outside version is about to be overwritten: whether nothing will be
  // replayed from it, or need not be from now on. Else it is to be copied.
  [[nodiscard]] bool free_of_readers(Version& version, const Table& level);
  // The program has dropped a constant: the same, if that takes no replay, nor more than it is worth.
  void free_dropped(const Version& version);
  // `version` becomes a constant: it keeps its bytes and forgets how it was made.
  void cut(Version& version);
  // Somebody outside may read or fill `version` by address, beyond the next operator; or a collective may, or
  // has been waited for.
  void note_addressed(Version& version);
  void note_communicated(Version& version, bool communicated);

  // The program has run an operator: it is written down, or compared with what was foreseen.
  void note_call(const ObservedCall& call);
  // The trace turned out to be of another program: what it predicted is forgotten.
  void lose_guide();
  // The program has run an operator: the record may be too long.
  void trim_if_long() {
    if (live_operations > trimmer.beyond()) trimmer.trim();
  }

  // The program's last tensor on `version`, a cell of `level`, is gone. Any thread, lock held or not.
  // Its bytes live until that has been noted, since they do until this returns, or else are held.
  void release(Ref<Version> version, Ref<Table> level, Store::HoldBytes hold);

  // In a forked child: is this domain lost? See Note [A fork loses the domains of other threads].
  void after_fork();
  [[nodiscard]] bool lost_to_fork() const { return lost_to_fork_; }
  // Whether this thread holds the lock.
  [[nodiscard]] bool is_held_here() const { return lock_.is_this_threads(); }

 private:
  friend class DomainLock;

  // release.cpp
  struct Released {
    Store::Bytes bytes;
    Ref<Version> version;
    Ref<Table> level;
    Released* next = nullptr;
  };
  void bury_released(std::unique_ptr<Released> released);
  void lock();
  void unlock();

  // Waits until what was the first to leave `table`, or one inside it, has gone.
  void let_one_leave(const Table& table);
  // Of what comes to `table`, or to one inside it, the last to be read goes back. False: nothing comes.
  bool turn_one_back(const Table& table);
  bool clear_for(const Version& version);
  void finish_leaving(Version& version);
  void finish_coming(Version& version);
  void expect_use(Version& version);
  void start_to_fetch(Version& version, bool wanted);
  void stop_leaving(Version& version);
  void stop_coming(Version& version);
  void lose_copy(Version& version, const CopyLost& why, bool wanted);
  void lose_bytes(Version& version, Journal::What how);
  bool bring_back_for_good(const Version& version, const std::vector<Version*>& dependents,
                           const Table& level);

  // When a version is read next. Those that one operator reads come in the order of their values, and
  // not of their addresses: a plan costs what it costs in whatever process it is simulated.
  struct Use {
    explicit Use(Version& read) : when(read.next_use), value(read.value), version(&read) {}
    auto operator<=>(const Use& other) const = default;

    double when;
    Trace::Id value;
    Version* version;
  };

  bool lists_candidates_ = false;
  std::uint64_t walked_in_vain_ = 0;  // `next_order` when free_dropped() last walked far, and freed nothing
  std::deque<Version*> leaving_;  // the first to leave first
  std::deque<Version*> coming_;
  std::set<Use> expected_;  // of what has a copy and is away
  QueueLock<Released> lock_;
  bool lost_to_fork_ = false;
};

// Holds a domain's lock for a scope, and buries what was released meanwhile.
class DomainLock {
 public:
  explicit DomainLock(std::shared_ptr<Domain> domain);
  explicit DomainLock(Domain& domain);  // which somebody keeps alive for the while
  // Of one that is not lost to a fork. It waits for no other thread.
  DomainLock(std::shared_ptr<Domain> domain, std::try_to_lock_t);
  ~DomainLock();
  DomainLock(const DomainLock&) = delete;
  DomainLock& operator=(const DomainLock&) = delete;

  // Whether this thread has any domain's lock.
  [[nodiscard]] static bool is_held() { return held_ > 0; }
  explicit operator bool() const { return locks_; }

 private:
  REMATFN_THREAD_LOCAL static int held_;

  const std::shared_ptr<Domain> alive_;
  Domain& domain_;
  const bool locks_ = true;
};

}  // namespace rematfn
