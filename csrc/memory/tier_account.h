// SPDX-License-Identifier: Apache-2.0
//
// tier_account.h: what lies in a tier, what room is left there, and how fast bytes come and go.

#pragma once

#include <atomic>
#include <cstddef>
#include <optional>
#include <string>

#include "memory/slab.h"

namespace rematfn {

struct TierFigures {
  struct Traffic {
    std::size_t bytes = 0;
    double bandwidth = 0;    // of late, in bytes per second; 0: not known yet
    std::size_t queued = 0;  // bytes that have been asked for and are not there yet
  };
  Traffic out, in;
  std::size_t held = 0;  // in units of Slab::kAlignment; of packed memory, to the byte
  std::size_t peak_held = 0;
  std::size_t capacity = 0;  // the budget, or what there is of it
  std::string trouble;       // why that is less, or what fails; empty if nothing has gone wrong
  std::size_t pinned = 0;    // of the host: what the system gave
  double waited = 0;         // of the host: seconds that kernels waited for copies, as far as known
};

// What is atomic any thread may read; all else is used under a lock of the tier's.
class TierAccount {
 public:
  // What is smaller tells of delays, not of bandwidth.
  static constexpr std::size_t kTelling = std::size_t{64} << 10;

  // In one direction.
  struct Traffic {
    // So many bytes took so many seconds.
    void note(std::size_t nbytes, double seconds);

    std::atomic<std::size_t> queued{0};
    std::atomic<double> bandwidth{0};
    std::size_t bytes = 0;

   private:
    double recent_bytes_ = 0;
    double recent_seconds_ = 0;
  };

  explicit TierAccount(std::size_t budget) : budget_(budget), slab_(budget) {}

  [[nodiscard]] bool has_room(std::size_t nbytes) const { return nbytes <= slab_.largest(); }
  [[nodiscard]] std::size_t capacity() const { return slab_.capacity(); }
  // An offset; nothing if there is no room.
  [[nodiscard]] std::optional<std::size_t> take(std::size_t nbytes);
  void give_back(std::size_t offset, std::size_t nbytes) { slab_.free(offset, nbytes); }
  // There is no room beyond that any more, and why.
  void limit(std::size_t capacity, const std::string& why);
  // There is room for what is held, and no more.
  void limit_to_held(const std::string& why) {
    limit(slab_.held(), why);
    may_have_room_again_ = true;
  }
  // What such limits have taken.
  void try_again();
  [[nodiscard]] TierFigures figures() const;

  Traffic out, in;

 private:
  const std::size_t budget_;
  Slab slab_;
  bool may_have_room_again_ = false;
  std::size_t peak_held_ = 0;
  std::string trouble_;
};

}  // namespace rematfn
