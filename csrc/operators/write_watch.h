// SPDX-License-Identifier: Apache-2.0
//
// write_watch.h: writes to tensors from outside that no level sees, by operators and by resizes.
//
// Note [Writes that nobody counts]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// What a replay reads from outside is held to its version counter, and autograd bumps that counter
// where an operator writes. Not all of them: the kernels of fused optimisers (`_fused_adam_`) write
// parameters, batch norms write their statistics, collectives whatever they are given, and so does a
// custom operator with `Tensor(a!)` in its schema and a kernel for backends alone. We must not bump
// it for them: programs that step a fused optimiser between two backwards would begin to fail. But
// they are operators, and what they write is known. The dispatch key under which autograd counts,
// ADInplaceOrView, is on every tensor with bytes, level or no level, and these operators have no kernel
// there (or, of those whose schema mentions no write, have one of autograd's that passes it by). So
// they are given one: it asks all domains whether they have read what is about to be
// written, and these keep a copy, as for Note [Hooks may write parameters].
//
// Note [Resizes are operators]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// `storage.resize_(n)` is a method of Python's that calls no operator. There is an operator that does
// the same, `inductor::resize_storage_bytes_`; so the method is made to call it wherever a level may
// have read the storage, or owns it. Under a level it is a write like any other: what was read is
// copied or stays as lineage, and what the storage is grown by counts. Elsewhere a copy would keep
// just the bytes that the program wants to be rid of; the domains hash them instead:
// Note [Evidence of contents].

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "operators/find_level.h"

namespace rematfn {

// An operator is about to overwrite storages, or to resize them: keeps a copy wherever recorded operations
// have read one, or takes note of what is there. `ours`: the domain that sees it, if any. Then the levels of
// the others are over; where there is no room for a copy they go without, for nobody may ever ask.
void save_for_readers(const Invocation& invocation, const FoundTensors& found, const Domain* ours = nullptr);

// Has writes by the operator seen, if autograd counts them not.
void watch_writes(const c10::OperatorHandle& op);

// `storage` is about to move (`share_memory_`), its values unchanged, by no operator.
void note_move(const c10::Storage& storage);
// Resizes `storage` if some level has to see it; else false.
bool resize_if_known(const c10::Storage& storage, std::int64_t nbytes);

}  // namespace rematfn
