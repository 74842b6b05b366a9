// SPDX-License-Identifier: Apache-2.0
//
// frugal.h: replays where next to nothing fits.
//
// Note [Frugal replays]
// ~~~~~~~~~~~~~~~~~~~~~
// Close to the least budget, replays that protect what they need softly evict each other's inputs.
// Here nothing is left to chance:
//   1. A sweep is the closure of some missing versions, in program order. What it takes at the most
//      is added up beforehand. If that fits it runs, and pins what it has and will still read; all else
//      may go.
//   2. Where a sweep does not fit, its versions are made one after the other, each pinned until the
//      operator that reads them all has run. One that does not fit alone either is made by making
//      the inputs of its producer, by the same rules. Unfinished operators are kept in a list of
//      frames: a recursion could be as deep as the program is long.
//   3. Which one is first decides how much is pinned on the way down. In `x + f(x)` it has to be x,
//      or each of n blocks would leave its f pinned; in a backward it has to be the gradient, or
//      each layer would leave its saved input. So that version is first after which the others need
//      the least, if by then all has gone that may.
// The pebble game asks for the least of all orders (Sethi, *Complete register allocation problems*,
// 1975); it is hard, and this is not it. docs/design/budget.md says what it comes to.
// Without it a chain of 40 blocks under torch.func.grad, which replays 7.7 times its cost within 100 kB, needs
// 116; and a search of 10,000 operators finds no plan for PaiNN's forces at 0.3.

#pragma once

#include <span>

#include "engine/room.h"

namespace rematfn {

// Makes `wanted` within the budget of `table`. Throws NoRoom; nothing is pinned then.
void replay_frugally(Room& room, Table& table, std::span<Version* const> wanted);

}  // namespace rematfn
