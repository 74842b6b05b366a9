// SPDX-License-Identifier: Apache-2.0
//
// tier_account.h: what lies in a tier, what room is left there, and how fast bytes come and go.

#pragma once

#include <atomic>
#include <cstddef>
#include <optional>
#include <string>

#include "memory/stretches.h"

namespace rematfn {

struct TierFigures {
  struct Traffic {
    std::size_t bytes = 0;
    double bandwidth = 0;    // of late, in bytes per second; 0: not known yet
    std::size_t queued = 0;  // bytes that have been asked for and are not there yet
  };
  Traffic out, in;
  std::size_t held = 0;  // in units of TierAccount::kUnit; of packed memory, to the byte
  std::size_t peak_held = 0;
  std::size_t capacity = 0;  // the budget, or what there is of it
  std::string trouble;       // why that is less, or what fails; empty if nothing has gone wrong
  std::size_t pinned = 0;    // of the host: what the system gave
  double waited = 0;         // of the host: seconds that kernels waited for copies, as far as known
};

// What a tier has, a file or memory, is one long piece, and divided here: what is asked for goes into the
// smallest stretch that holds it, as low as possible. What is atomic any thread may read; all else is used
// under a lock of the tier's.
class TierAccount {
 public:
  static constexpr std::size_t kUnit = 4096;  // that sizes are rounded up to
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

  explicit TierAccount(std::size_t budget) : budget_(budget) { set_capacity(budget); }

  // The bytes that so many take.
  [[nodiscard]] static std::size_t rounded(std::size_t nbytes);
  // Any thread.
  [[nodiscard]] bool has_room(std::size_t nbytes) const { return nbytes <= largest_; }
  [[nodiscard]] std::size_t capacity() const { return capacity_; }
  // An offset; nothing if there is no room. Zero bytes are one unit.
  [[nodiscard]] std::optional<std::size_t> take(std::size_t nbytes);
  void give_back(std::size_t offset, std::size_t nbytes);
  // Bytes that have their place elsewhere.
  void hold(std::size_t nbytes) { set_held(held_ + nbytes); }
  void release(std::size_t nbytes) { set_held(held_ - nbytes); }
  // There is no room beyond that any more, and why.
  void limit(std::size_t capacity, const std::string& why);
  // There is room for what is held, and no more.
  void limit_to_held(const std::string& why) {
    limit(held_, why);
    may_have_room_again_ = true;
  }
  // What such limits have taken.
  void try_again();
  [[nodiscard]] TierFigures figures() const;

  Traffic out, in;

 private:
  // What is held beyond it stays; what is free at the end goes, as far as it lies beyond.
  void set_capacity(std::size_t capacity);
  void set_held(std::size_t nbytes);

  const std::size_t budget_;
  std::size_t capacity_ = 0;
  std::size_t held_ = 0;
  std::size_t end_ = 0;  // of what is divided
  Stretches free_;
  std::atomic<std::size_t> largest_{0};  // that there is room for
  bool may_have_room_again_ = false;
  std::size_t peak_held_ = 0;
  std::string trouble_;
};

}  // namespace rematfn
