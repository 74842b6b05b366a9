// SPDX-License-Identifier: Apache-2.0
#include "engine/journal.h"

#include <algorithm>

#include "engine/table.h"
#include "engine/trace.h"

namespace rematfn {

double Journal::now() const {
  return std::chrono::duration<double>(Clock::now() - begun_).count();
}

void Journal::add(What what, Id index, float score) {
  const Id during = calls.empty() ? kNone : static_cast<Id>(calls.size() - 1);
  events.push_back({what, index, during, now(), root_.used_bytes(), score});
}

// ---- calls --------------------------------------------------------------------------------------

void Journal::begin(std::string_view name, const Site& site, bool backward) {
  Call& call = calls.emplace_back();
  call.name = name;
  call.site = site;
  // The nodes of a backward on another thread have numbers of their own.
  if (calls.size() > 1) call.site.nodes = std::max(site.nodes, calls[calls.size() - 2].site.nodes);
  call.begun = now();
  call.backward = backward;
}

void Journal::note_run(double cost, std::size_t peak) {
  Call& call = last();
  call.cost = cost;
  call.used = root_.used_bytes();
  call.peak = peak;
  call.ended = now();
}

void Journal::note_reads(const ObservedCall& call) {
  for (const ObservedCall::Read& read : call.reads) {
    if (read.version->entry != kNone) last().reads.push_back(read.version->entry);
  }
}

void Journal::note_replay(const Operation& operation) {
  Id call = kNone;
  for (const Version* output : operation.outputs) {
    if (output != nullptr && output->entry != kNone) call = values[output->entry].made_by;
  }
  add(What::kReplay, call);
}

// Calls are in the order in which nodes are numbered, so the first one by whose time a node was there is
// that which made it: nodes are made before the kernel that they are for runs.
Journal::Id Journal::forward_of(Id call) const {
  const Site& site = calls[call].site;
  if (site.node == Site::kNoNode) return kNone;
  const auto end = calls.begin() + static_cast<std::ptrdiff_t>(call);
  const auto found = std::partition_point(
      calls.begin(), end, [&](const Call& earlier) { return earlier.site.nodes <= site.node; });
  return found == end ? kNone : static_cast<Id>(found - calls.begin());
}

std::vector<std::uint32_t> Journal::places() const {
  std::vector<std::uint32_t> found(calls.size());
  for (Id i = 0; i < calls.size(); ++i) {
    const Id forward = forward_of(i);
    found[i] = calls[i].site.place != 0 || forward == kNone ? calls[i].site.place : found[forward];
  }
  return found;
}

std::uint32_t Journal::place_of_last() const { return calls.empty() ? 0 : places().back(); }

// ---- values -------------------------------------------------------------------------------------

void Journal::note_made(Version& version) {
  if (version.entry == kNone) {
    version.entry = static_cast<Id>(values.size());
    // A copy of what is to be overwritten is made before the operator that overwrites it.
    const bool by_an_operator = !calls.empty() && last().ended >= 0;
    const Id by = by_an_operator ? static_cast<Id>(calls.size() - 1) : kNone;
    values.push_back({.nbytes = version.nbytes, .made_by = by});
  }
  Value& value = values[version.entry];
  value.has_producer = static_cast<bool>(version.producer);
  value.raw = version.raw;
  value.kept = version.kept;
  add(What::kMade, version.entry);
}

void Journal::note(What what, const Version& version) {
  if (version.entry == kNone) return;  // it was there before the journal was
  const bool evicted = what == What::kDropped || what == What::kMoved;
  add(what, version.entry, evicted ? static_cast<float>(values[version.entry].score) : 0);
}

void Journal::note_cut(const Version& version) {
  if (version.entry != kNone) values[version.entry].cut_at = static_cast<Id>(events.size());
}

void Journal::note_score(const Version& version, double score) {
  if (version.entry != kNone) values[version.entry].score = score;
}

void Journal::note_held(const Version& version) {
  if (version.entry != kNone) values[version.entry].held = true;
}

}  // namespace rematfn
