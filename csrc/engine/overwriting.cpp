// SPDX-License-Identifier: Apache-2.0
//
// Note [What an old value is needed for]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A step that ends with its optimiser writes each parameter, and all that forward and backward have
// made was made from it. To copy whatever operations have read would hold every parameter twice. But
// most of what was made is gone, and nobody asks for it any more. What the program still has of it (a
// logit, a gradient, what a graph that is not released has saved) are its dependents: those that are
// found first on the ways from the value, past what is lineage alone.
//   1. A dependent that is here becomes a constant. It cannot be dropped any more, but the function
//      itself would hold it as well; and the lineage before it goes. But where something has had to go and
//      values of the forward are among them that are larger than the old one, they may have to go, too: FSDP
//      gathers parameters over those that a unit has read, long before the backward. It is copied then.
//   2. One that is away would be replayed from the old value. Where all that are away come to no more
//      than the value, or there is no room for a copy of it, they are brought back first, if they fit.
//      So they are where a gradient is among them: who writes a parameter by its gradient goes on with
//      the others, reads theirs, and would have all parameters copied. What will not be read again, as
//      far as a guide knows, is not brought back for the sake of fewer bytes.
//   3. Else the value is copied, and all stays as it was.
//   4. What has a copy elsewhere needs no replay.
// A constant that the program drops has lost its bytes in just the same way, but that lineage may keep
// them: it does where a dependent is away, or where something has had to go and the dependents are larger.
#include <algorithm>
#include <exception>
#include <iterator>
#include <vector>

#include "base/interpreter.h"
#include "engine/domain.h"

namespace rematfn {
namespace {

bool waits_for_backward(const Version* version) {
  return version->may_go() && !version->backward && version->next_use != kNever;
}

}  // namespace

bool Domain::free_of_readers(Version& version, const Table& level) {
  if (version.readers == nullptr) return true;
  const std::vector<Version*> dependents = *neighbourhood.dependents(version, kNoCap);
  if (std::ranges::any_of(dependents, is_away)) {
    if (!bring_back_for_good(version, dependents, level)) return false;
  } else if (lists_candidates() && bytes_of(dependents, waits_for_backward) > version.nbytes &&
             could_make_room(level, version.nbytes)) {
    return false;
  }
  for (Version* dependent : dependents) cut(*dependent);
  return version.readers == nullptr;
}

// Rule 2
bool Domain::bring_back_for_good(const Version& version, const std::vector<Version*>& dependents,
                                 const Table& level) {
  const auto is_useless = [](const Version* v) { return is_away(v) && v->next_use == kNever; };
  const auto is_missed = [](const Version* v) {
    return is_away(v) && v->backward && v->next_use != kNever;
  };
  const bool costs_more = bytes_of(dependents, is_away) > version.nbytes ||
                          std::ranges::any_of(dependents, is_useless);
  if (costs_more && std::ranges::none_of(dependents, is_missed) &&
      could_make_room(level, version.nbytes)) {
    return false;
  }
  if (!could_make_room(level, bytes_of(dependents, goes_or_is_away))) return false;
  std::vector<Version*> wanted;
  std::ranges::copy_if(dependents, std::back_inserter(wanted),
                       [](const Version* v) { return v->copied_by() == nullptr; });
  try {
    materialize(wanted);
  } catch (const NoRoom&) {
    return false;
  } catch (const std::exception& error) {  // nobody has asked for it yet
    if (is_stop(error)) throw;
    return false;
  }
  return std::ranges::none_of(dependents, is_away);
}

Table* Domain::snapshot(Version& version, Table& level) {
  Version* wanted = &version;
  if (version.table) materialize({&wanted, 1});
  const Pinned stays(version);
  make_room(level, version.nbytes);
  store.copy(version);
  Table* const home = version.table.get();  // the operator keeps it alive
  if (home != nullptr) expel(version);
  lose_tensor(version);
  admit(level, version);
  if (home != nullptr) charge_original(*home, version.nbytes);
  return home;
}

}  // namespace rematfn
