// SPDX-License-Identifier: Apache-2.0
//
// domain.h: a tree of nested levels that share one lineage, one clock and one lock.
//
// A domain decides: what to evict to make room, what to replay to have a version again. What doing
// so means is left to the class that derives from it; tensors are one answer, numbers another.
//
// Note [The program may drop a tensor at any time]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A tensor may die on any thread, in the middle of an operator, while its thread holds Python's
// lock. Waiting for the domain's lock there could deadlock with an operator that waits for Python's,
// and changing the table there would pull it away from under the code that walks it. So if the lock
// is not free, release() only queues the version, for whoever holds the lock to bury as it lets go.
// Until then the version is what it was, for who holds the lock: its bytes are queued along with it,
// and its cell, though nobody's, is not gone.
//
// Note [A fork loses the domains of other threads]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A forked child has one thread. What another thread of the parent held locked stays locked in the
// child for good, and what it was about to change stays half changed. To wait for all locks before a
// fork would be to wait for kernels, which may wait for the interpreter, which the forking thread
// holds. So a domain that is busy on another thread at that moment is lost to the child: its tensors
// may be dropped there, and using them is an error. All others go on.

#pragma once

#include <optional>
#include <span>

#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>

#include "base/queue_lock.h"
#include "base/thread_local.h"
#include "engine/lineage.h"
#include "engine/trace.h"
#include "policy/thrash.h"

namespace rematfn {

class Guide;

// Note [Closure walks are capped]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// The default score sums the cost of a candidate's evicted ancestors. After some thousand evictions
// that closure can be most of the program, and walking it for every candidate would make eviction
// quadratic. The first 256 operations decide: what lies beyond only says "very expensive" more
// loudly. h_DTR is the reference and walks all of it.
//
// Each version that leaves or comes back needs a walk as well, to mark stale what depends on it. Where
// a guide knows the next uses, what lies far away changes a score little, and 16 operations do: plans
// cost what they did, and the simulator is up to 1.8 times as fast, which a search makes use of.
// Without a guide a score is made of ancestors alone, and replays would rise by a hundredth.
constexpr std::size_t kWalkCap = 256;
constexpr std::size_t kGuidedMarkCap = 16;

// Thrown when room cannot be made: what `table` would have to allow for, and what stands in the way.
struct NoRoom {
  Table* table = nullptr;
  std::size_t smallest_budget = 0;
  std::size_t unevictable = 0;  // resident bytes left when nothing more could go
  bool thrashing = false;   // replays evict each other's inputs without end; the bytes are a guess
};

class Domain : public std::enable_shared_from_this<Domain> {
 public:
  Domain();
  virtual ~Domain();

  double clock = 0;  // See Note [Staleness is counted in program time]
  std::uint64_t next_order = 1;
  std::size_t live_operations = 0;
  // See Note [A record that is too long is trimmed]
  static constexpr std::size_t kMostOperations = std::size_t{1} << 18;
  void limit_operations(std::size_t most) { most_operations_ = trims_beyond_ = most; }

  // Whether tables list what may go; they do from the first time that something has to.
  [[nodiscard]] bool lists_candidates() const { return lists_candidates_; }
  void list_candidates();
  // Evicts until `table` and every table around it can hold `nbytes` more. Throws NoRoom.
  void make_room(Table& table, std::size_t nbytes);
  // Whether it looks as if it can.
  [[nodiscard]] bool could_make_room(const Table& table, std::size_t nbytes);
  // What `table` may have, as things stand.
  [[nodiscard]] static std::size_t budget_of(const Table& table);
  // Waits for a moment, with the lock held. Threads that share a budget may evict meanwhile.
  void lend();
  // Evicts one version of `table` or, when it has none left, of a table inside it.
  bool evict_one(Table& table);
  // Evicts everything evictable of `table` and of the tables inside it; or only what its policy does
  // not keep.
  void evict_all(Table& table, bool spare_kept = false);
  // Evicts `version` if it is resident and nobody needs it to stay. True if it did.
  bool evict_if_free(Version& version);
  void evict(Version& version);
  // `version` has its bytes again.
  void arrive(Version& version);
  // `version` becomes a constant: it keeps its bytes and forgets how it was made.
  void cut(Version& version);
  // The program has run an operator: the record may be too long.
  void trim_if_long() {
    if (live_operations > trims_beyond_) trim();
  }

  // Makes all of `wanted` resident at once, by replays in program order. Throws NoRoom.
  void materialize(std::span<Version* const> wanted);
  // Would a version just recomputed be read again, by a planned replay or by the program? `dead` will
  // not be replayed any more.
  [[nodiscard]] static bool is_wanted(const Version& version, const Version* dead = nullptr);

  // In a forked child: is this domain lost? See Note [A fork loses the domains of other threads].
  void after_fork();
  void leave_shared_after_fork();
  [[nodiscard]] bool lost_to_fork() const { return lost_to_fork_; }
  // Whether this thread holds the lock.
  [[nodiscard]] bool is_held_here() const { return lock_.is_this_threads(); }

  // The program's last tensor on `version`, a cell of `level`, is gone. Any thread, lock held or not.
  // Its bytes live until that has been noted, since they do until this returns, or else are held.
  using Bytes = c10::intrusive_ptr<c10::intrusive_ptr_target>;
  using HoldBytes = c10::function_ref<Bytes()>;
  static Bytes no_bytes() { return {}; }
  void release(Ref<Version> version, Ref<Table> level, HoldBytes hold);
  // `version` has lost its bytes; it stays as lineage.
  void leave(Version& version);

  // The program has run an operator: it is written down, or compared with what was foreseen.
  void note_call(const ObservedCall& call);
  // The trace turned out to be of another program: what it foretold is forgotten.
  void lose_guide();

  // At most one of the two.
  std::unique_ptr<Recorder> recorder;
  std::shared_ptr<Guide> guide;
  std::shared_ptr<const Trace> known;  // of an earlier call that was alike
  bool guide_lost = false;
  Table* root = nullptr;  // the outermost level
  std::vector<Table*> shared_tables;  // those that share their budget
  Thrash thrash;

  // Cost of replaying what `version` waits for, per the definition of `kind`.
  double neighbourhood(const Version& version, ScoreKind kind);
  // When the program reads `version` next, or something evicted that it takes `version` to replay.
  [[nodiscard]] double next_use(const Version& version);

 protected:
  // Frees the bytes of an evictable version.
  virtual void drop(Version& version) = 0;
  // Whether somebody we do not know of holds the version's storage.
  [[nodiscard]] virtual bool held_elsewhere(const Version& version) = 0;
  // The program let go of `version`, which stays resident on `bytes`. False if these are gone.
  virtual bool retain(Version& version, const Bytes& bytes) = 0;
  // The program let go of `version`. True if its bytes went with the tensor.
  virtual bool forget(Version& version) = 0;
  // Whether the bytes of a resident version are gone without a word of it.
  [[nodiscard]] virtual bool lost(const Version& version) = 0;
  // `version`, now a constant, must outlive the program's tensors on it.
  virtual void keep_alive(Version& version) = 0;
  // Throws if the user wants the program to stop.
  virtual void serve_signals() {}

 private:
  friend class Borrowed;
  friend class DomainLock;

  bool evict_one(Table& table, bool spare_pending);
  Version* find_victim(Table& table, bool spare_pending);

  // sharing.cpp
  struct Offer {
    Table* table;
    double score;
  };
  struct Taken {
    bool enough = false;
    bool any = false;
    bool some_busy = false;
  };
  void make_shared_room(Table& table, std::size_t nbytes);
  [[nodiscard]] std::optional<Offer> offer_for(const SharedBudget& budget);
  Taken take(Table& table, std::size_t nbytes);
  void settle_claims();

  // trim.cpp
  struct Trim;
  void trim();
  void trim(Table& table, Trim& goal);
  [[nodiscard]] bool has_ancestors(const Version& version, std::size_t count);

  // victims.cpp
  [[nodiscard]] bool has_to_stay(const Version& version);
  [[nodiscard]] Score score_in_force(const Table& table);
  Version* choose(Table& table, bool spare_pending);
  Version* choose_by_judge(Table& table, bool spare_pending);
  Version* lowest_of_batch(Table& table, const Score& kind, bool spare_pending);
  bool pick_batch(Table& table, const Score& kind, bool spare_pending);
  Victims lowest_of_all(Table& table, const Score& kind, bool spare_pending, std::size_t most);
  void refresh(Candidate& c, const Version& version, ScoreKind kind);
  [[nodiscard]] bool prices_pending(const Table& table) const;
  void evict_by_price(Table& table, std::size_t nbytes);

  // neighbourhood.cpp
  void walk_readers(const Version& version, std::size_t cap);
  template <class Visit>
  bool is_any_dependent(const Version& version, std::size_t cap, Visit visit);
  [[nodiscard]] bool is_asked_for(const Version& version);
  // `version` has gone or come back. See Note [Stale scores are too low].
  void mark_dependents_stale(const Version& version, bool came_back);
  void mark_sources_stale(const Version& version, bool came_back);
  void join_component(Operation& operation);
  void leave_component(Operation& operation);
  std::uint32_t component_root(std::uint32_t component);

  // burial.cpp
  void bury_contents(Ref<Version> version, HoldBytes hold);
  [[nodiscard]] bool is_kept_for_somebody(const Version& version);
  [[nodiscard]] bool is_kept_for_evicted(const Version& version) const;
  void let_go_of_kept_for(const Version& version);

  // release.cpp
  struct Released {
    Bytes bytes;
    Ref<Version> version;
    Ref<Table> level;
    Released* next = nullptr;
  };
  void bury_released(std::unique_ptr<Released> released);
  void lock();
  void unlock();

  // replay.cpp
  struct Later {
    bool operator()(const Ref<Operation>& a, const Ref<Operation>& b) const {
      return a->order > b->order;
    }
  };
  [[nodiscard]] bool is_missing(Version& version);
  void plan(Version& missing);
  void run_plan();
  void replay_softly(std::span<Version* const> wanted, std::size_t per_operation);
  void bring_back(std::span<Version* const> wanted);
  [[nodiscard]] NoRoom try_to_bring_back(std::span<Version* const> wanted);
  [[nodiscard]] static NoRoom thrashing(Table& table);
  void replay_now(Operation& operation);
  void abandon_plan();
  void discard_if_useless(Version& version);
  void make_room_to_replay(Operation& operation);
  void hold(Version& version, const Operation* reader);
  void let_go_of_inputs(const Operation* reader);
  void let_go_of_all();

  // frugal.cpp
  struct Sweep;
  struct Frame;
  void replay_frugally(Table& table, std::span<Version* const> wanted);
  [[nodiscard]] Sweep foresee(Table& table, std::span<Version* const> missing,
                              std::span<Version* const> kept, const Version* first = nullptr);
  [[nodiscard]] std::size_t peak_of(const Sweep& sweep, const Table& table,
                                    const Version* first) const;
  [[nodiscard]] Version* easiest_first(Table& table, std::span<Version* const> missing,
                                       std::span<Version* const> kept);
  void run(Sweep& sweep);
  void enter(Ref<Operation> operation);
  void finish_frame();
  void leave_frame();
  void pin_in_frame(Version& version);

  std::vector<Ref<Operation>> heap_;
  // Pins of Rule 4, innermost plan last: whose they are, and on what.
  std::vector<std::pair<const Operation*, Ref<Version>>> held_;
  bool planning_ = false;
  int retries_ = 0;               // Rule 5
  std::size_t replays_left_ = 0;  // Rule 6
  std::vector<Frame> frames_;        // the innermost last
  std::size_t lookahead_left_ = 0;   // operations
  bool retains_ = false;  // something has been retained
  bool lists_candidates_ = false;
  std::size_t most_operations_ = kMostOperations;
  std::size_t trims_beyond_ = kMostOperations;  // so many live operations
  bool any_refreshed_ = false;  // else all candidates are stale
  std::uint64_t mark_ = 0;
  std::vector<Operation*> walk_;
  std::vector<std::pair<std::uint32_t, double>> components_{{0, 0.0}};  // parent, sum of costs

  enum class Lending : std::uint8_t { kNot, kLent, kTaken };
  Lending lending_ = Lending::kNot;  // under the lock of sharing.cpp
  bool is_borrowed_ = false;
  QueueLock<Released> lock_;
  bool lost_to_fork_ = false;
};

// Holds a domain's lock for a scope, and buries what was released meanwhile.
class DomainLock {
 public:
  explicit DomainLock(std::shared_ptr<Domain> domain);
  explicit DomainLock(Domain& domain);  // which somebody keeps alive for the while
  ~DomainLock();
  DomainLock(const DomainLock&) = delete;
  DomainLock& operator=(const DomainLock&) = delete;

  // Whether this thread has any domain's lock.
  [[nodiscard]] static bool is_held() { return held_ > 0; }

 private:
  REMATFN_THREAD_LOCAL static int held_;

  const std::shared_ptr<Domain> alive_;
  Domain& domain_;
};

}  // namespace rematfn
