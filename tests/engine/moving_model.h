// SPDX-License-Identifier: Apache-2.0
//
// moving_model.h: tests of an engine whose values may move.

#pragma once

namespace rematfn {

void moves_where_replays_thrash(unsigned count);
void moves(unsigned count);
void programs_that_leave_their_record(unsigned count);
void what_is_not_in_use_leaves();
void packs(unsigned count);
void returns_come_ahead();
void what_comes_back_too_soon_stays_longer();
void plans_decide_by_value();
void plans_that_break_their_word(unsigned count);
void plans_that_broke(unsigned count);
void what_is_addressed_stays();
void pauses_hide_copies();
void calls_are_timed();

}  // namespace rematfn
