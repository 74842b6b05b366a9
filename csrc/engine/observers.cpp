// SPDX-License-Identifier: Apache-2.0
#include "engine/observers.h"

namespace rematfn {

void Observers::note_run(Table& level, double cost, double flops, std::size_t peak) {
  for (Table* t = &level; t != nullptr; t = t->enclosing.get()) {
    ++t->statistics.operators;
    t->statistics.base_cost += cost;
    t->statistics.base_flops += flops;
  }
  if (journal) [[unlikely]] journal->note_run(cost, peak);
}

void Observers::note_call(const ObservedCall& call, Report& report) {
  if (recorder) [[unlikely]] {
    recorder->note(call);
    if (recorder->is_too_long()) {
      recorder.reset();
      report.trace.reset();
    }
  }
  if (journal) [[unlikely]] journal->note_reads(call);
  if (guide) guide->follow(call);
}

void Observers::note_eviction(const Version& version, bool keeps_copy) {
  ++version.table->statistics.evictions;
  if (keeps_copy) note_move(version);
}

void Observers::note_move(const Version& version) {
  Statistics& statistics = version.table->statistics;
  ++statistics.moves;
  statistics.moved_bytes += version.nbytes;
}

void Observers::note_return(const Version& version) {
  note(Journal::What::kReturned, version);
  Statistics& statistics = version.table->statistics;
  ++statistics.returns;
  statistics.returned_bytes += version.nbytes;
}

void Observers::note_turned_back(const Version& version) {
  note(Journal::What::kTurnedBack, version);
  ++version.table->statistics.turned_back;
}

void Observers::note_replayed(const Operation& operation) {
  Statistics& statistics = operation.table->statistics;
  ++statistics.replays;
  statistics.replayed_cost += operation.cost;
  statistics.replayed_flops += operation.flops;
}

}  // namespace rematfn
