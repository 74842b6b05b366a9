// SPDX-License-Identifier: Apache-2.0
#include "tensors/tier.h"

namespace rematfn {

LinkFigures Tier::link() const {
  LinkFigures found = unmeasured_;
  const double out = account().out.bandwidth;
  const double in = account().in.bandwidth;
  if (out > 0 || in > 0) {
    found.per_byte_out = 1 / (out > 0 ? out : in);
    found.per_byte_in = 1 / (in > 0 ? in : out);
  }
  return found;
}

}  // namespace rematfn
