// SPDX-License-Identifier: Apache-2.0
//
// sharing.h: who makes room in a budget that several share.
//
// Note [Whoever needs room may take it]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// All members' values stand in one order, that of the default score. Each table names the one that its
// own policy would evict next, and the lowest of these goes. Time is the members' together: what a
// block made does not stay young because its level has ended and its clock stands still. So the blocks
// of a model evict as one level around all of them would, in the forward the oldest block's values
// first, which are read last. Values that a queued replay will read go after all others, and only
// their own domain's plan takes them.
//
// To wait for another domain's lock while one holds one is how threads come to wait for each other. So:
//   1. Whoever has to take from others waits for its turn, of which the process has one. Whose turn it
//      is has the members' domains to itself: their locks are tried, all at once, and none is waited for.
//   2. Whoever waits lends: it keeps its lock, so that no operator comes between, but whose turn it is
//      may evict from it. What it needs itself is pinned.
//   3. To wait makes sense as long as some domain is busy and does not lend: what its operator holds
//      will be free. If all have been looked at, there is no room: NoRoom, for the one that found out.
//      The others wait on, since it is about to free what it holds.
//   4. A busy operator may wait for something that the waiting one holds, where we cannot see it. So
//      nobody waits for longer than a minute in which nothing changes.
//
// Note [An address is good until its level's next operator]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// What is read behind the dispatcher is made resident just before, and as no operator comes between,
// it is not evicted again. Where a budget is shared, an operator of another level may come between. So
// a version that was asked for in this way is not taken by others until its own domain has recorded
// another operator.

#pragma once

namespace rematfn {

class Domain;

// Waits for a moment, with the lock of `domain` held. Threads that share a budget may evict meanwhile.
void lend(Domain& domain);

}  // namespace rematfn
