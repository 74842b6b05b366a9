// SPDX-License-Identifier: Apache-2.0
//
// burial.cpp: the part of Room that buries what the program drops, or keeps it for what is replayed from it.

#include <algorithm>

#include "engine/room.h"

namespace rematfn {

// Note [A kept value outlives the program's tensors]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// In `(x @ w).tanh()` autograd saves the result alone, and the program drops the product. Whoever
// asks for products to be kept wants the result to be replayed from it. So a kept value that the
// program drops stays, as long as the program holds something that would be replayed from it, and
// goes with the last such thing. Without these rules almost all of the forward would stay to the end:
//   1. A gradient is no such thing, though it is made from all of the forward; nor does it stay.
//   2. Nor is what is small beside the value, such as the loss.
//   3. Beyond the next kept value, that one serves.
//   4. Where all but the named is kept, nothing stays.
//   5. A mark alone keeps no value that the program has dropped, but where a policy around chooses what
//      the forward leaves: in a budget that the program fits in as it is, marks must cost nothing.
//
// Note [What is away is made again from what is here]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A backward drops a gradient as soon as the next one is made from it. If that one has been evicted meanwhile, for
// the replay of an activation beside it, nothing is left to make it from, and its replay is one of all of the
// backward so far. So a value stays if the program holds something that was made from it directly and is away. It
// goes when its dependent has been replayed, or when room is needed, by its score. Replayed cost of first calls, by
// `ON()`, of the program's own (an MLP of eight layers; forces by double backward; a Jacobian):
//
//                        MLP 0.3   e3nn 0.5, 0.35   PaiNN 0.35   MACE 0.35   DenseNet 0.4   Jacobian 0.4
//   without                 12.8     1.71, 10.33         5.35        1.54           0.30          26.9
//   with                     2.2     0.60,  4.71         2.77        0.39           0.10           2.9
//
// Of 152 cells, 0.7 to 0.1 of the peak, total cost falls to 0.958 (geometric mean), and one fits that did not. A GPT
// under torch.func at 0.1 replays 5.6 in place of 1.5. Plans know what is read next: with the rule they replayed more
// (a DenseNet at 0.3 0.74 in place of 0.28), so it is not for a call that runs as recorded by one.
void Room::bury(Ref<Version> version, Store::HoldBytes hold) {
  if (!version) [[unlikely]] return;
  lose_tensor(*version);
  observers.note(Trace::What::kRelease, *version);
  // See Note [A schedule is carried out], 3
  const bool is_scheduled = observers.schedule() != nullptr && version->is_candidate();
  const bool stays = version->has_bytes() && version->producer &&
                     (is_kept_for_somebody(*version) || is_scheduled || makes_what_is_away(*version)) &&
                     store.retain(*version, hold());
  if (stays) [[unlikely]] list_candidates();
  retains_ |= stays;
  if (version->table && !version->producer && !version->trimmed) [[unlikely]] {
    free_dropped(*version, lists_candidates());
  }
  const bool goes = !stays && store.forget(*version);
  // Of a constant that lineage reads, what is coming is all that there is.
  const bool is_needed = version->place() == Place::kComing && !version->producer && version->readers;
  if (goes && !is_needed && version->table && version->has_bytes()) note_gone(*version);
  if (retains_ && observers.schedule() == nullptr) drop_kept_for(*version);
}

static bool is_decided(const Table& table) {  // Rule 5
  const Table* t = &table;
  while (t != nullptr && !t->policy.keeping.decides()) t = t->enclosing.get();
  return t != nullptr;
}

bool Room::is_kept_for_somebody(const Version& version) {
  constexpr std::size_t kSmall = 64;  // so many times smaller
  if (!version.kept || version.backward || !version.table) [[likely]] return false;
  if (version.table->policy.keeping.marks == Keeping::Marks::kAllBut) return false;
  if (version.marked && !is_decided(*version.table)) return false;
  Walk walk(walks);
  walk.visit_readers(version, kNoCap);
  for (std::size_t i = 0; i < walk.size(); ++i) {
    if (i == kWalkCap) return true;  // See Note [Closure walks are capped]
    for (const Version* output : walk[i].outputs) {
      if (output == nullptr) continue;
      if (output->pending > 0) return true;
      const bool is_small = output->nbytes < version.nbytes / kSmall;
      if (output->has_tensor && !output->backward && !is_small) return true;
      if (output->must_be_replayed() && !output->kept) walk.visit_readers(*output, kNoCap);
    }
  }
  return false;
}

// See Note [What is away is made again from what is here]
bool Room::makes_what_is_away(const Version& version) const {
  if (!lists_candidates() || (foresees() && observers.guide->is_as_recorded())) return false;
  const auto is_missed = [](const Version* output) {
    return output != nullptr && output->has_tensor && is_away(output);
  };
  for (const Input* reader = version.readers; reader != nullptr; reader = reader->next) {
    if (std::ranges::any_of(reader->reader->outputs, is_missed)) return true;
  }
  return false;
}

// See Note [A kept value outlives the program's tensors]
void Room::drop_kept_for(const Version& version) {
  if (!version.producer) return;
  Walk walk(walks);
  walk.visit(*version.producer);
  std::vector<Version*> sources;
  for (std::size_t i = 0; i < walk.size() && i < kWalkCap; ++i) {
    for (const Input& input : walk[i].inputs) {
      Version& source = *input.version;
      if (source.has_tensor) continue;
      if (source.kept && source.producer && source.is_candidate()) sources.push_back(&source);
      if (!source.kept && source.must_be_replayed()) walk.visit(*source.producer);
    }
  }
  for (Version* source : sources) {
    if (source->may_go() && source->pending == 0 && !is_kept_for_somebody(*source)) drop(*source);
  }
}

// Lineage that is cut is not walked again. To walk what is not, to its end, for each constant before it would
// make a program of n operators cost n^2. So after a long walk in vain the next may be as long as what has been
// run since, or as Note [Closure walks are capped] has it.
void Room::free_dropped(const Version& version, bool weighs) {
  if (version.readers == nullptr) return;
  const std::size_t cap = std::max<std::size_t>(next_order - walked_in_vain_, kWalkCap);
  const auto dependents = neighbourhood.dependents(version, cap);
  const bool is_kept = !dependents || std::ranges::any_of(*dependents, is_away) ||
                       (weighs && bytes_of(*dependents, goes_or_is_away) > version.nbytes);
  if (!is_kept) {
    for (Version* dependent : *dependents) cut(*dependent);
  } else if (walks.found.size() >= kWalkCap) {
    walked_in_vain_ = next_order;
  }
}

}  // namespace rematfn
