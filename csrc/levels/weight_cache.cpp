// SPDX-License-Identifier: Apache-2.0
#include "levels/weight_cache.h"

#include <ATen/autocast_mode.h>

#include <utility>
#include <vector>

#include "levels/boundary.h"

namespace rematfn {

// Its wrappers exclude its key while they cast, other than the program.
bool is_cast_of_autocast(const c10::TensorImpl& leaf, const c10::IValue& dtype) {
  const auto device = leaf.device().type();
  return dtype.isInt() && !at::autocast::is_autocast_enabled(device) &&
         dtype.toScalarType() == at::autocast::get_autocast_dtype(device);
}

void note_cast(Level& level, c10::TensorImpl& leaf) {
  level.cast_leaves.emplace_back(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(&leaf));
}

// See Note [Autocast keeps casts of weights]
void seal_cached_casts(Level& level) {
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> leaves;
  {
    const DomainLock lock(level.domain);
    leaves.swap(level.cast_leaves);
  }
  if (leaves.empty() || !at::autocast::is_autocast_cache_enabled()) return;
  Level* heir = level.heir();
  for (const auto& weak : leaves) {
    auto impl = weak.lock();
    if (!impl) continue;
    const at::Tensor leaf{std::move(impl)};
    const auto device = leaf.device().type();
    if (!at::autocast::is_autocast_enabled(device) || leaf.scalar_type() != at::kFloat) continue;
    // What the cache has for the leaf. It has nothing only if the program cleared it by hand.
    seal(at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), leaf, device), level);
    if (heir == nullptr) continue;
    const DomainLock lock(heir->domain);
    note_cast(*heir, *leaf.unsafeGetTensorImpl());
  }
}

}  // namespace rematfn
