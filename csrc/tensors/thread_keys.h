// SPDX-License-Identifier: Apache-2.0
//
// thread_keys.h: which operators of a thread come to us: the dispatch keys that are on for it.

// Note [A kernel may be Python]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A custom operator's kernel may use `torch.func`, a mode or the compiler. Each of these includes the keys that it
// wants, and a key that is excluded stays off. So what surrounds a replay is turned off by what it has included, and
// by the stacks of functorch's levels and of modes: the kernel would find them below its own. Only what a first
// run excludes, too, is excluded.

#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>

#include "tensors/dispatch_key.h"

namespace rematfn {

// Whether a level is active on this thread: its operators come to us from now on, or no more.
void set_intercepting(bool on);
// Whether this thread's operators come to us: a level is active, and no kernel or replay of ours runs.
[[nodiscard]] inline bool is_intercepting() {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  return (keys.included_ - keys.excluded_).has(kLevelKey);
}
// Whether a kernel or a replay of ours runs on this thread: what its operators read is in place.
[[nodiscard]] inline bool is_below_levels() {
  return c10::impl::tls_local_dispatch_key_set().excluded_.has(kLevelKey);
}

// Until the thread's state is restored, as it is for each node of autograd's, operators come to us
// though no level runs; unless the node stays outside.
void see_operators();

// For a scope: operators do not come to us, and factories find their backend as usual.
// See Note [Keys that come back]
struct BelowLevels : private c10::impl::ForceDispatchKeyGuard {
  BelowLevels();
};

// What BelowLevels does, until the thread's state is restored (autograd's engine does so for each node).
void stay_outside();

// For a scope: operators run as kernels do, with nothing that interprets them above the backends.
// See Note [A kernel may be Python]
class BackendScope {
 public:
  BackendScope();
  ~BackendScope();
  BackendScope(const BackendScope&) = delete;
  BackendScope& operator=(const BackendScope&) = delete;

 private:
  struct Stacks;

  const c10::impl::LocalDispatchKeySet keys_;  // of before
  std::unique_ptr<const Stacks> stacks_;       // the same; null if both were empty
};

}  // namespace rematfn
