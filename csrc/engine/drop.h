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

  [[nodiscard]] std::string_view name() const override { return "drop"; }
  [[nodiscard]] bool keeps_copy() const override { return false; }
  [[nodiscard]] bool applies(const Version& version) const override;
  [[nodiscard]] double cost(const Version& version) const override;
  [[nodiscard]] Place leave(Version& version) override;

 private:
  Store& store_;
};

}  // namespace rematfn
