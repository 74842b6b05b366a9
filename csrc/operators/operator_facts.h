// SPDX-License-Identifier: Apache-2.0
//
// operator_facts.h: what a schema and its tags say about an operator, looked up once.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>

#include "operators/races.h"
#include "policy/work.h"

namespace rematfn {

struct OperatorFacts {
  c10::SmallVector<std::uint8_t, 2> writes;  // arguments whose contents change
  c10::SmallVector<std::uint8_t, 2> training_writes;  // the same, if `training_argument` is true
  int training_argument = -1;
  bool is_view = false;           // every output is an alias, nothing is written: no bytes touched
  bool is_plain_view = false;     // and no fact needs the full path: the end of `read_facts`
  bool announces_read = false;    // whoever calls it is about to read the bytes by address
  bool announces_address = false;  // and may keep that address
  bool changes_metadata = false;  // `t_`, `set_`: the tensor changes, its storage does not
  bool moves_storage = false;     // `set_`: it changes to another one
  bool makes_fresh = false;       // some output may have bytes of its own
  bool reads_shapes_only = false;  // `zeros_like`: whatever bytes its argument has
  bool resizes_storage = false;   // to as many bytes as its second argument says
  bool communicates = false;      // its kernel may read and write after it has returned
  bool ends_work = false;         // `wait_tensor`: what another kernel did to its argument is done
  bool waits_for_ranks = false;   // its kernel, and does nothing else
  bool writes_uncounted = false;  // autograd counts no write of some argument
  // Its writes may be counted before the kernel runs, as are those of operators defined in Python.
  bool may_count_first = false;
  bool writes_aside = false;  // in training: Note [Statistics are written aside]
  bool leaves_raw = false;  // `empty`: the output's contents are whatever was there
  // Results, a bit for each, whose contents are whatever was there, at least in part.
  std::uint32_t unspecified = 0;
  bool overwrites = false;  // what it writes does not depend on the old contents
  bool draws_random = false;
  bool may_draw = false;  // no tag says so: Note [Whether an untagged operator draws is observed]
  bool never_replayed = false;
  Races races = Races::kNever;
  bool selects_backend = false;   // has a BackendSelect kernel: a factory
  bool dynamic_shape = false;     // the size of an output depends on data
  bool ends_filling = false;      // `lift_fresh`: its argument has been filled by address
  Work work = Work::kBytes;

  [[nodiscard]] bool may_write() const { return !writes.empty() || !training_writes.empty(); }
};

[[nodiscard]] std::shared_ptr<const OperatorFacts> facts_of(const c10::OperatorHandle& op);
// Note [Operators are known by an address]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// What is known of an operator is filed under the address of its schema. A library that goes takes
// its operators with it, and the next operator may come to lie at the same address, with another
// schema. So whatever is filed also belongs to a generation, which ends when an operator goes.
[[nodiscard]] std::uint64_t operator_generation();
void end_operator_generation();

}  // namespace rematfn
