// SPDX-License-Identifier: Apache-2.0
//
// domain.h: a tree of nested levels that share one lineage, one clock and one lock.
//
// It is built in layers, each of which knows those below: the Ledger says where versions are and what they
// weigh, Moves has their bytes go and come, Room chooses what goes, and buries what the program drops; a Domain
// replays, and has the lock. What doing so means for bytes, its Store knows, and how a version goes and comes
// back, the Ways of its tables.
//
// Note [The program may drop a tensor at any time]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A tensor may die on any thread, in the middle of an operator, while its thread holds Python's
// lock. Waiting for the domain's lock there could deadlock with an operator that waits for Python's,
// and changing the table there would pull it away from under the code that walks it. So if the lock
// is not free, release() only queues the version, for whoever holds the lock to bury as it unlocks.
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

#include <deque>
#include <memory>
#include <mutex>
#include <span>

#include "base/queue_lock.h"
#include "base/thread_local.h"
#include "engine/replayer.h"
#include "engine/room.h"

namespace rematfn {

class Domain : public Room, public std::enable_shared_from_this<Domain> {
 public:
  using Room::Room;

  Replayer replayer{*this};

  // Makes all of `wanted` resident at once; `before_call` of the program, also what a schedule replays before it.
  // Throws NoRoom.
  void materialize(std::span<Version* const> wanted, bool before_call = false) {
    replayer.materialize(wanted, before_call);
  }
  // Makes all of `wanted` resident, one after another: what is there stays while the next is made. Near the
  // least budget more fits so than by one queue of replays for all. Throws NoRoom.
  void gather(std::span<Version* const> wanted) {
    std::deque<Pinned> there;
    for (Version* version : wanted) {
      materialize({&version, 1});
      there.emplace_back(*version);
    }
  }

  // overwriting.cpp
  // Keeps a copy of a constant or outside version that is about to be overwritten, as `level`'s. Returns
  // the table in which the original counts from then on, until that is told otherwise; null if nowhere.
  Table* snapshot(Version& version, Table& level);
  // A constant or outside version is about to be overwritten: whether nothing will be replayed from it, or
  // need not be from now on. Else it is to be copied.
  [[nodiscard]] bool free_of_readers(Version& version, const Table& level);

  // release.cpp
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

  struct Released {
    Store::Bytes bytes;
    Ref<Version> version;
    Ref<Table> level;
    Released* next = nullptr;
  };
  void bury_released(std::unique_ptr<Released> released);
  void lock();
  void unlock();

  void take_from_others(Table& table, std::size_t nbytes) override;  // sharing.cpp
  bool bring_back_for_good(const Version& version, const std::vector<Version*>& dependents,
                           const Table& level);

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
