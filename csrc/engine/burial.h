// SPDX-License-Identifier: Apache-2.0
//
// burial.h: buries what the program drops, or keeps it for what is replayed from it.

#pragma once

#include "engine/table.h"
#include "engine/store.h"

namespace rematfn {

class Burial {
 public:
  explicit Burial(Domain& domain) : domain_(domain) {}

  // The program has no tensor on `version` any more.
  void bury(Ref<Version> version, Store::HoldBytes hold);
  // Whether the program, or a scheduled replay, has something that is to be replayed from a kept value.
  [[nodiscard]] bool is_kept_for_somebody(const Version& version);

 private:
  [[nodiscard]] bool is_kept_for_evicted(const Version& version) const;
  void let_go_of_kept_for(const Version& version);

  Domain& domain_;
  bool retains_ = false;  // something has been kept in this way
};

}  // namespace rematfn
