// SPDX-License-Identifier: Apache-2.0
//
// tenant.h: on whose behalf pages stay resident.

#pragma once

#include <cstddef>

namespace rematfn {

// Asked on any thread, under the lock of the pool of pages.
class Tenant {
 public:
  [[nodiscard]] virtual bool lives() const = 0;
  // Bytes of its budget that nothing uses, and of results that it has yet to hand out.
  [[nodiscard]] virtual std::size_t unused() const = 0;
  // Of results that it has: the next one like it will want as many.
  [[nodiscard]] virtual std::size_t handed_out() const { return 0; }

 protected:
  ~Tenant() = default;
};

}  // namespace rematfn
