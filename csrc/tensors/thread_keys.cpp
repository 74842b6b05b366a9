// SPDX-License-Identifier: Apache-2.0
#include "tensors/thread_keys.h"

#include <torch/csrc/autograd/function.h>

#include "base/thread_local.h"

namespace rematfn {
namespace {

REMATFN_THREAD_LOCAL bool is_under_level = false;
// BackendSelect: see Note [Which key we borrow].
constexpr c10::DispatchKeySet kBackendSelect{c10::DispatchKey::BackendSelect};

void force_below(c10::impl::LocalDispatchKeySet keys) {
  keys.included_ = keys.included_ | kBackendSelect;
  keys.excluded_ = keys.excluded_ | kLevelKeySet;
  c10::impl::_force_tls_local_dispatch_key_set(keys);
}

}  // namespace

void set_intercepting(bool on) {
  is_under_level = on;
  auto keys = c10::impl::tls_local_dispatch_key_set();
  keys.included_ = on ? (keys.included_ | kLevelKeySet) - kBackendSelect
                      : (keys.included_ - kLevelKeySet) | kBackendSelect;
  c10::impl::_force_tls_local_dispatch_key_set(keys);
}

void see_operators() {
  auto keys = c10::impl::tls_local_dispatch_key_set();
  if (keys.excluded_.has(kLevelKey)) return;  // the node stays outside
  keys.included_ = (keys.included_ | kLevelKeySet) - kBackendSelect;
  c10::impl::_force_tls_local_dispatch_key_set(keys);
}

// Note [Keys that come back]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Some guards of torch's restore a thread's keys as they found them. One made in `f` (repr has one)
// lives on in the traceback if an exception is raised under it, and may go long after the level. Two
// kinds are known. The first restores the excluded keys alone; so a level changes none of these, and
// takes BackendSelect out of the included ones instead. The second restores all: our key is then
// included on a thread whose stack is empty. Every operator comes to us in that state, factories
// too, and the first one puts the keys right; but not within a node of autograd's, which may have asked
// for it, and whose state the engine takes back.
BelowLevels::BelowLevels() : saved_(c10::impl::tls_local_dispatch_key_set()) {
  if (!is_under_level && saved_.included_.has(kLevelKey) && !torch::autograd::get_current_node()) {
    set_intercepting(false);
    saved_ = c10::impl::tls_local_dispatch_key_set();
  }
  force_below(saved_);
}

BelowLevels::~BelowLevels() { c10::impl::_force_tls_local_dispatch_key_set(saved_); }

void stay_outside() { force_below(c10::impl::tls_local_dispatch_key_set()); }

BackendScope::BackendScope() : saved_(c10::impl::tls_local_dispatch_key_set()) {
  c10::impl::LocalDispatchKeySet bare = saved_;
  bare.included_ = c10::default_included_set;
  bare.excluded_ = c10::default_excluded_set | kAboveLevels;
  c10::impl::_force_tls_local_dispatch_key_set(bare);
}

BackendScope::~BackendScope() { c10::impl::_force_tls_local_dispatch_key_set(saved_); }

}  // namespace rematfn
