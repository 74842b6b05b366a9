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
//   3. Which one is first decides how much is pinned on the way down. It is the first that the
//      operator reads: in a backward mostly the gradient, without which each layer would leave its
//      saved input pinned. What comes from a copy is fetched by itself.
// The pebble game asks for the least of all orders (Sethi, *Complete register allocation problems*,
// 1975); it is hard, and this is not it. docs/design/budget.md says what it comes to.
// Without it a ResNet's first call at 1.1 times the floor, which replays 6.5 times its cost, is refused. To make
// that one first after which the others need the least, by trying each, changes none of 167 first calls but one, which
// it makes worse (19 networks and traces, from the floor to half of the peak).

#pragma once

#include <span>
#include <vector>

#include "engine/room.h"

namespace rematfn {

class FrugalReplayer {
 public:
  explicit FrugalReplayer(Room& room);
  ~FrugalReplayer();

  // Makes `wanted` within the budget of `table`. Throws NoRoom.
  void replay(Table& table, std::span<Version* const> wanted);
  // Lets go of all that was pinned on the way.
  void abandon();

 private:
  struct Sweep;
  struct Frame;
  [[nodiscard]] Sweep foresee(Table& table, std::span<Version* const> missing,
                              std::span<Version* const> kept);
  // False if another walk came between.
  [[nodiscard]] bool reach(Sweep& sweep, std::span<Version* const> missing,
                           std::span<Version* const> kept);
  [[nodiscard]] std::size_t peak_of(const Sweep& sweep, const Table& table) const;
  void run(Sweep& sweep);
  void enter(Ref<Operation> operation);
  void finish_frame();
  void leave_frame();
  void pin_in_frame(Version& version);

  Room& room_;
  std::vector<Frame> frames_;       // the innermost last
  std::size_t lookahead_left_ = 0;  // operations
};

}  // namespace rematfn
