// SPDX-License-Identifier: Apache-2.0
//
// move.h: a way of letting go that moves numbers.

#pragma once

#include <cstddef>
#include <map>
#include <string_view>

#include "engine/lineage.h"
#include "random_program.h"

namespace rematfn {

// Copies numbers of bytes to a place that has room for `most`. Every other copy takes its time.
class Move final : public Way {
 public:
  explicit Move(std::size_t most) : most_(most) {}

  [[nodiscard]] std::string_view name() const override { return "move"; }
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
  void wait(Version& version) override {
    if (copies_.at(&version) == State::kComing) return forget(version);
    expect(copies_.at(&version) == State::kLeaving, "what is waited for is under way");
    copies_[&version] = State::kWhole;
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

 private:
  enum class State { kLeaving, kWhole, kComing };

  void forget(Version& version) {
    copies_.erase(&version);
    bytes_ -= version.nbytes;
  }

  const std::size_t most_;
  std::size_t bytes_ = 0;
  std::map<const Version*, State> copies_;
};

}  // namespace rematfn
