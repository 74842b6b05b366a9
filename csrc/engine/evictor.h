// SPDX-License-Identifier: Apache-2.0
//
// evictor.h: chooses what goes.

#pragma once

#include <vector>

#include "engine/table.h"

namespace rematfn {

class Moves;

class Evictor {
 public:
  explicit Evictor(Moves& moves) : moves_(moves) {}

  // A candidate goes, by its way.
  void evict(Version& version);
  // Evicts one version of `table` or, when it has none left, of a table inside it; else drops a copy in memory.
  bool evict_one(Table& table);
  // The same, of those that will not be read again, as far as is known, nor be missed.
  bool evict_useless(Table& table);
  // What speaks against letting a candidate go: minus infinity if it will not be read again, as far
  // as is known; NaN where a custom score says so.
  [[nodiscard]] double score_of(const Version& version);
  // The one that goes next.
  [[nodiscard]] Version* find_victim(Table& table, bool spare_pending);
  // Evicts everything evictable of `table` and of the tables inside it; or only what its policy does
  // not keep.
  void evict_all(Table& table, bool spare_kept = false);
  // Evicts `version` if it is resident and nobody needs it to stay. True if it did.
  bool evict_if_free(Version& version);
  // Of the tables that leave early: what has not been touched since `before` leaves by a copy, once it has lain for
  // as long as that takes to pay.
  void evict_untouched(double before);
  // By a way that keeps a copy, if that pays before the room is wanted.
  void evict_early(Version& version);

  // For good: what can be moved is not dropped. See Note [Replay runs in program order], Rule 6.
  void move_from_now_on() { moves_all_ = true; }

  // Makes room for `nbytes`, of what is not pinned, as far as there is any. What queued replays will read is scored
  // like all else: Note [Near the floor], Rule 2. Nothing, where that cannot be.
  void evict_by_price(Table& table, std::size_t nbytes);

 private:
  // `version` goes by a copy, if that pays now and it is not kept.
  void evict_by_copy(Version& version);
  [[nodiscard]] bool has_to_stay(Version& version);
  [[nodiscard]] bool may_be_missed(const Version& version) const;
  [[nodiscard]] bool find_way(Version& version) const;
  [[nodiscard]] const Score& score_in_force(const Table& table) const;
  [[nodiscard]] ScoreContext context_for(const Score& kind);
  Version* choose(Table& table, bool spare_pending);
  Version* choose(Table& table, const Score& kind, const ScoreContext& context, bool spare_pending,
                  std::vector<Version*>& refused);
  static void refuse(Version& version, std::vector<Version*>& refused);
  Version* choose_by_custom_score(Table& table, bool spare_pending);
  Version* lowest_of_batch(Table& table, const Score& kind, const ScoreContext& context,
                           bool spare_pending);
  bool pick_batch(Table& table, const Score& kind, const ScoreContext& context,
                  bool spare_pending);
  void refresh(Candidate& c, Version& version, const Score& kind);
  // Where there are several, the one that costs the least, with what dropping has replayed before it.
  void choose_way(Candidate& c, Version& version, const Score& kind);

  Moves& moves_;
  bool moves_all_ = false;
};

}  // namespace rematfn
