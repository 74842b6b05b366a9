// SPDX-License-Identifier: Apache-2.0
//
// move.h: a way of letting go that moves numbers.

#pragma once

#include <cstddef>
#include <map>

#include "engine/lineage.h"
#include "random_program.h"

namespace rematfn {

// Copies numbers of bytes to a place that has room for `most`. Every other copy takes its time. If it
// may fail, one copy in eight cannot be made, and one in eight is lost.
class Move final : public Way {
 public:
  explicit Move(std::size_t most, bool may_fail = false) : most_(most), may_fail_(may_fail) {}

  [[nodiscard]] bool keeps_copy() const override { return true; }
  [[nodiscard]] bool applies(const Version&) const override { return true; }
  [[nodiscard]] bool has_room(const Version& version) const override {
    return bytes_ + version.nbytes <= most_;
  }
  [[nodiscard]] double cost(const Version& version) const override {
    return 4e-7 * static_cast<double>(version.nbytes);
  }
  Place leave(Version& version) override {
    expect(version.is_readable(), "what leaves is here");
    expect(copies_.emplace(&version, State::kWhole).second, "what leaves has no copy yet");
    bytes_ += version.nbytes;
    ++moves;
    if (moves % 2 == 0) return Place::kAway;
    copies_[&version] = State::kLeaving;
    return Place::kLeaving;
  }
  Place bring_back(Version& version) override {
    expect(copies_.at(&version) == State::kWhole, "a whole copy comes back");
    ++returns;
    if (returns % 2 == 0) return forget(version), Place::kHere;
    copies_[&version] = State::kComing;
    return Place::kComing;
  }
  Place wait(Version& version) override {
    ++waits;
    if (copies_.at(&version) == State::kComing) {
      if (may_fail_ && waits % 8 == 0) {
        ++lost;
        copies_[&version] = State::kWhole;
        throw CopyLost("the copy is lost");
      }
      forget(version);
      ++late;
      return Place::kHere;
    }
    expect(copies_.at(&version) == State::kLeaving, "what is waited for is under way");
    if (may_fail_ && waits % 8 == 1) {
      forget(version);
      return Place::kHere;
    }
    copies_[&version] = State::kWhole;
    return Place::kAway;
  }
  bool has_arrived(const Version& version) const override {
    expect(copies_.at(&version) != State::kWhole, "what is asked for is under way");
    return ++asked % 3 == 0;
  }
  bool is_due(const Version&, double) const override { return ++asked % 2 == 0; }
  double pays_after(const Version&) const override { return ++asked % 4 == 0 ? 0 : kNever; }
  void turn_back(Version& version) override {
    expect(copies_.at(&version) == State::kComing, "what turns back was coming");
    copies_[&version] = State::kWhole;
    ++turned_back;
  }
  void discard(Version& version) override {
    expect(copies_.contains(&version), "what is discarded is a copy");
    discards_under_way += copies_[&version] == State::kLeaving;
    forget(version);
  }

  [[nodiscard]] bool is_empty() const { return copies_.empty() && bytes_ == 0; }
  std::size_t moves = 0;
  std::size_t returns = 0;
  std::size_t discards_under_way = 0;
  std::size_t waits = 0;
  std::size_t turned_back = 0;
  std::size_t late = 0;
  std::size_t lost = 0;
  mutable std::size_t asked = 0;

 private:
  enum class State { kLeaving, kWhole, kComing };

  void forget(Version& version) {
    copies_.erase(&version);
    bytes_ -= version.nbytes;
  }

  const std::size_t most_;
  const bool may_fail_;
  std::size_t bytes_ = 0;
  std::map<const Version*, State> copies_;
};

}  // namespace rematfn
