// SPDX-License-Identifier: Apache-2.0
//
// drop.h: versions are dropped, and replayed.

#pragma once

#include "engine/store.h"
#include "engine/way.h"

namespace rematfn {

class Drop final : public Way {
 public:
  explicit Drop(Store& store) : store_(store) {}

  [[nodiscard]] bool keeps_copy() const override { return false; }
  [[nodiscard]] bool applies(const Version& version) const override {
    return static_cast<bool>(version.producer);
  }
  [[nodiscard]] double cost(const Version& version) const override { return version.producer->cost; }
  [[nodiscard]] Place leave(Version& version) override {
    store_.drop(version);
    return Place::kAway;
  }

 private:
  Store& store_;
};

}  // namespace rematfn
