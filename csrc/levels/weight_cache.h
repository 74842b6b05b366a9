// SPDX-License-Identifier: Apache-2.0
//
// weight_cache.h: the casts of weights that autocast keeps.
//
// Note [Autocast keeps casts of weights]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Autocast casts a leaf that requires gradients once, and remembers the cast until the outermost
// autocast ends. If that is around `f`, a cast made in `f` outlives the level, and the next function
// reads it: it leaves, without being returned. So when `f` ends under autocast, what the cache has
// for the leaves that were cast is sealed. To ask for a cast that it does not have would make one, which
// stays as it is when the leaf is written; so casts of the program's own do not count. If all autocast ended within `f`, the cache is empty, and
// the casts that autograd saved are the level's to evict.

#pragma once

#include "levels/level.h"

namespace rematfn {

// Whether a cast of `leaf` that is about to run may be one that autocast keeps: not `w.double()`.
[[nodiscard]] bool is_cast_of_autocast(const c10::TensorImpl& leaf, const c10::IValue& dtype);
// Notes that `leaf` was cast while the level was active.
void note_cast(Level& level, c10::TensorImpl& leaf);
void seal_cached_casts(Level& level);

}  // namespace rematfn
