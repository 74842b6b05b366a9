// SPDX-License-Identifier: Apache-2.0
//
// invariant.h: what must hold whatever a program does; broken, it is our error.

#pragma once

#include <stdexcept>
#include <string>

namespace rematfn {

inline void require_invariant(bool holds, const char* invariant) {
  if (!holds) {
    throw std::logic_error(std::string("rematfn: invariant broken, please report it: ") + invariant);
  }
}

}  // namespace rematfn
