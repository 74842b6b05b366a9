// SPDX-License-Identifier: Apache-2.0
//
// step.h: the journey of one operator under its level.
//
// Note [One journey for tensors and numbers]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A plan is only worth as much as the simulator that judged it. So there is no second engine: a
// simulation is a Domain whose operations move numbers. Nor is there a second journey. What happens
// to versions and to tables while an operator runs stands here once; LevelCall takes tensors on it,
// and the simulation takes the values of a trace.
//
// Note [Before, not after]
// ~~~~~~~~~~~~~~~~~~~~~~~~~
// A budget that evicts once an operator has run is exceeded by that operator's outputs each time.
// So room for what a call allocates is made first: for what is known of it before it runs, and for the rest as
// its kernel asks. What is known not to fit is refused before it has touched anything.
//
// Note [Mutation is a new version]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// After h = x.sin(); x.add_(1) a replay of the sine must see the old x. For a level's own value that
// costs nothing: the old version stays as lineage and can be replayed into a storage of its own. But
// the contents of an argument, of a parameter or of anything else that cannot be replayed are gone
// once overwritten. Where they will be needed, by this very call or by Note [What an old value is needed
// for], they are copied first and the copy takes the version's place.
//
// An operator that only writes, such as a fused optimiser's, may overwrite parameters and, in a first
// call, states that could be replayed. To record it would take copies of the parameters. So what makes
// nothing fresh is recorded only if all that it overwrites can be replayed.

#pragma once

#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "engine/ledger.h"
#include "policy/work.h"

namespace rematfn {

class Step {
 public:
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

 protected:
  // What the operator reads or overwrites.
  struct Operand {
    Version* version = nullptr;  // null: no level knows of it yet
    Table* home = nullptr;       // the level that its contents belong to; null: the caller's
    bool written = false;
  };
  // What the operator will allocate.
  struct Need {
    std::size_t certain_bytes = 0;
    std::size_t likely_bytes = 0;  // what is likely beyond the certain is a guess
  };
  // Of what it makes.
  struct Nature {
    bool raw = false;  // uninitialised
    bool backward = false;
    Work work = Work::kBytes;
    bool communicated = false;  // filled by a collective
    bool replayable = true;
    bool makes_fresh = true;  // beside what it overwrites
    bool writes_aside = false;  // See Note [Statistics are written aside]
  };
  // What has been copied before a write.
  struct Saved {
    Version* version;
    std::size_t operand;
    Table* home;  // where the original counts, until it is overwritten; null: nowhere
  };
  static constexpr std::int32_t kFresh = -1;

  Step(Domain& domain, Table& level);
  ~Step() {
    if (!pinned_.empty()) [[unlikely]] unpin_all();
  }

  // From what is foreseen to the results. Throws NoRoom before the operator runs.
  void run();
  // Nothing is pinned any more: what was not foreseen is made good.
  void finish();

  void set_operand(std::size_t i, Version* version, Table* home, bool written) {
    operands_[i] = {version, home, written};
    writes_ |= written;
  }
  // Once all are set. The last of them that are written aside are no inputs.
  void count_inputs();
  void bring_back();
  void unpin_all();
  void pin_for_step(Version& version) {
    pin(version);
    pinned_.emplace_back(&version);
  }
  // The operator needs what is certain. Throws NoRoom if that is more than a budget.
  void require_room();

  // It has failed, and what it was to overwrite is about to be recorded as contents that nobody can replay.
  void observe_failure();
  // To be called by take_results(): first this. `taken`: what it has, in seconds and bytes; `peak_bytes`: of
  // what it allocated,
  void account(const CallFacts& taken, std::size_t peak_bytes);
  // then for each version that the operator has made, in the place of an operand or fresh. True if it
  // can be replayed.
  [[nodiscard]] bool begin(Version& contents, std::int32_t over);
  // And this, when the operation has it among its outputs, if so.
  void admit(const Ref<Version>& contents, std::int32_t over);

  c10::SmallVector<Operand, 6> operands_;
  c10::SmallVector<Saved, 1> saved_;
  std::size_t inputs_ = 0;   // how many of these are the operation's, if it is recorded
  bool writes_ = false;      // some operand is overwritten
  bool is_bounded_ = false;  // some level around has a budget
  bool is_metered_ = false;  // so what the operator allocates is to be known
  bool is_recorded_ = false;  // it may be replayed
  Nature nature_;
  Need need_;
  std::size_t granted_ = 0;  // what room was made for
  Ref<Operation> operation_;

 private:
  [[nodiscard]] virtual std::string_view operator_name() const = 0;
  [[nodiscard]] virtual Site site() const { return {}; }  // for a journal
  [[nodiscard]] virtual bool are_on_one_storage(std::size_t operand, std::size_t other) const = 0;
  // In the order in which they are called.
  [[nodiscard]] virtual Need foresee() = 0;  // if metered
  // The last chance to say what the operands are.
  virtual void prepare() {}
  // What is about to be overwritten, if that is known, and if it would be asked for.
  [[nodiscard]] virtual Ref<Version> find_overwritten(std::size_t operand) = 0;
  // What no level knows of yet, to be written down by an observer; not what is about to be overwritten.
  [[nodiscard]] virtual Ref<Version> find_outside(std::size_t /*operand*/) { return {}; }
  // There was no need to copy it.
  virtual void note_not_copied(std::size_t /*operand*/) {}
  // It has been copied, and is not going to be overwritten.
  virtual void note_not_written(std::size_t /*operand*/) {}
  [[nodiscard]] virtual Ref<Operation> make_operation() = 0;
  virtual void take_inputs() = 0;  // of the operation
  virtual void run_kernel() {}
  virtual void take_results() = 0;

  // Bytes of the operands that count in `table`.
  [[nodiscard]] std::size_t input_bytes_in(const Table& table) const;
  // It sets the least budget of `table`, so far.
  void note_need(Table& table, std::size_t nbytes) const;
  void save_what_is_overwritten();
  [[nodiscard]] bool is_saved(const Version& version) const;
  void abandon_writes();
  void discharge_original(const Version& version);
  [[nodiscard]] bool overwrites_only_replayable() const;
  [[nodiscard]] Ref<Version> observed(std::size_t operand);
  void make_room();
  void leave_early();
  void evict_spent();
  void observe(const CallFacts& taken);

  Domain& domain_;
  Table& level_;
  double before_ = 0;  // program time
  c10::SmallVector<std::size_t, 2> inputs_in_;  // bytes that count, in the level and in each table around it
  c10::SmallVector<Ref<Version>, 6> pinned_;
  c10::SmallVector<std::pair<std::size_t, Ref<Version>>, 1> overwritten_;  // by operand
  std::optional<ObservedCall> seen_;           // if somebody records or guides
  c10::SmallVector<std::int32_t, 6> read_of_;  // where in seen_.reads an operand stands
};

}  // namespace rematfn
