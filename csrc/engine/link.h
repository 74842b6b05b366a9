// SPDX-License-Identifier: Apache-2.0
//
// link.h: a way that carries copies over a link, out and in, which takes time.
//
// Note [What moving costs]
// ~~~~~~~~~~~~~~~~~~~~~~~~
// A copy goes out while operators run. To come back it takes the time of its transfer, and, on demand,
// all of that is waited for. A guide has it come ahead: then nobody waits, as long as the link can
// carry what goes over it. So a plan puts a price on the link, a share of the transfer's time, at which
// what moves and what is replayed balance. Without a guide it is the whole, and the way out besides: what
// wants the room waits for it. What is compared with that has to be in seconds too: where a level may move,
// the cost of an operator is the time it takes.
// How early a return begins is the plan's as well: so many times earlier than it takes.

#pragma once

#include <cstddef>

#include "engine/ledger.h"

namespace rematfn {

// In seconds.
struct LinkFigures {
  double latency = 0;
  double per_byte_out = 0;
  double per_byte_in = 0;
  bool one_way_at_a_time = false;  // the two directions share the link
  double drag = 0;  // so much longer operators take while something is on its way
  bool clocked = false;  // the host's clock tells what a call takes
  bool packs = false;    // copies stay in the memory; operators wait for both directions, and none comes ahead
};

// Of one that cannot be packed into clearly less, nothing is copied.
[[nodiscard]] inline bool is_worth_packing(const Version& version) { return version.packed_share <= 0.75F; }

class Link : public Way {
 public:
  explicit Link(Ledger& ledger) : ledger_(ledger) {}

  [[nodiscard]] bool keeps_copy() const final { return true; }
  [[nodiscard]] double cost(const Version& version) const final;
  [[nodiscard]] bool is_due(const Version& version, double until) const final;
  [[nodiscard]] double pays_after(const Version& version) const final;

  // For tests: every cost is drawn at random from now on, so that versions move or are dropped at random.
  static void draw_costs(bool drawn);

 protected:
  [[nodiscard]] double lead(const Version& version) const;
  [[nodiscard]] virtual LinkFigures figures() const = 0;
  // Bytes that are on their way in, or to be.
  [[nodiscard]] virtual std::size_t queued_in() const = 0;
  [[nodiscard]] double time_out(std::size_t nbytes) const;
  [[nodiscard]] double time_in(std::size_t nbytes) const;
  Ledger& ledger_;
};

}  // namespace rematfn
