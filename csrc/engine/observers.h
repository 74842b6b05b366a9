// SPDX-License-Identifier: Apache-2.0
//
// observers.h: those who are told what a program does, and what becomes of its versions.
//
// The ledger and the journey of an operator tell this class; who listens, they do not ask. It counts in the
// statistics of levels. A recorder writes the program down, a guide compares it with what was written down,
// a journal says what happened and why. Of them only the guide is asked for advice, by those who choose. What
// takes work to find out is found only if there is a journal, and told to that itself.

#pragma once

#include <memory>
#include <string>

#include "engine/guide.h"
#include "engine/journal.h"
#include "engine/trace.h"

namespace rematfn {

class Observers {
 public:
  // Or null.
  std::unique_ptr<Recorder> recorder;
  std::shared_ptr<Guide> guide;
  std::shared_ptr<Journal> journal;  // null: nobody asks

  // Whether somebody is to see what operators read and make.
  [[nodiscard]] bool see_calls() const { return recorder || guide || journal; }
  // Whether they ask what an operator allocates.
  [[nodiscard]] bool see_needs() const { return recorder || journal; }

  // ---- an operator of the program, in this order --------------------------------------------------
  // Returns what passes before it, in program time.
  [[nodiscard]] double note_next() { return guide ? guide->pause_before_next() : 0; }
  // It took `observed` seconds. Returns what it costs, in program time. `overhead` and `copying`: see Guide.
  [[nodiscard]] double note_taken(double observed, std::size_t output_bytes, double overhead, double copying) {
    if (!guide) return observed;
    guide->note_taken(observed, overhead, copying);
    return guide->cost_of_next(observed, output_bytes);
  }
  // It has run, and allocated `peak` bytes at once.
  void note_run(Table& level, double cost, double flops, std::size_t peak);
  void note_call(const ObservedCall& call, Report& report);

  // ---- a schedule ----------------------------------------------------------------------------------
  [[nodiscard]] const Schedule* schedule() const { return guide ? guide->schedule() : nullptr; }
  [[nodiscard]] bool has_replays_due() const { return guide && guide->has_replays_due(); }
  void forget(const Operation& operation) {
    if (guide) guide->forget(operation);
  }

  // ---- what else the program does ----------------------------------------------------------------
  void note(Trace::What what, const Version& version) {
    if (recorder) [[unlikely]] recorder->note(what, version);
  }
  void note_mark(const Version& version, const std::string& name) {
    if (recorder) recorder->note_mark(version, name);
  }
  void note_packed(const Version& version) {
    if (recorder) recorder->note_packed(version);
  }
  void note_unrecorded(std::size_t nbytes) {
    if (recorder) recorder->note_unrecorded(nbytes);
    if (journal) journal->note_unrecorded();
  }

  // ---- what becomes of a version, as the ledger has it --------------------------------------------
  void note_made(Version& version) {
    if (journal) [[unlikely]] journal->note_made(version);
  }
  void note(Journal::What what, const Version& version) {
    if (journal) [[unlikely]] journal->note(what, version);
  }
  void note_cut(const Version& version) {
    if (journal) journal->note_cut(version);
  }
  void note_held(const Version& version) {
    if (journal) journal->note_held(version);
  }
  // It goes, by a way that keeps a copy or by one that does not.
  void note_eviction(const Version& version, bool keeps_copy);
  // A copy is made of it, or taken over.
  void note_move(const Version& version);
  void note_return(const Version& version);
  void note_turned_back(const Version& version);
  void note_replay(const Operation& operation) {
    if (journal) journal->note_replay(operation);
  }
  void note_replayed(const Operation& operation);
};

}  // namespace rematfn
