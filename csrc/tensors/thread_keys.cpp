// SPDX-License-Identifier: Apache-2.0
#include "tensors/thread_keys.h"

#include <ATen/functorch/DynamicLayer.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>

#include <vector>

#include "base/thread_local.h"

namespace rematfn {
namespace {

using c10::impl::TorchDispatchModeTLS;
using c10::impl::tls_local_dispatch_key_set;

REMATFN_THREAD_LOCAL bool is_under_level = false;
// BackendSelect: see Note [Which key we borrow].
constexpr c10::DispatchKeySet kBackendSelect{c10::DispatchKey::BackendSelect};

c10::impl::LocalDispatchKeySet below(c10::impl::LocalDispatchKeySet keys) {
  keys.included_ = keys.included_ | kBackendSelect;
  keys.excluded_ = keys.excluded_ | kLevelKeySet;
  return keys;
}

c10::impl::LocalDispatchKeySet keys_of_kernels() {
  auto keys = tls_local_dispatch_key_set();
  keys.included_ = c10::default_included_set;
  keys.excluded_ = c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView | kLevelKeySet;
  return keys;
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
c10::impl::LocalDispatchKeySet put_right(c10::impl::LocalDispatchKeySet keys) {
  if (is_under_level || !keys.included_.has(kLevelKey)) return keys;
  if (torch::autograd::get_current_node()) return keys;
  set_intercepting(false);
  return tls_local_dispatch_key_set();
}

}  // namespace

void set_intercepting(bool on) {
  is_under_level = on;
  auto keys = tls_local_dispatch_key_set();
  keys.included_ = on ? (keys.included_ | kLevelKeySet) - kBackendSelect
                      : (keys.included_ - kLevelKeySet) | kBackendSelect;
  c10::impl::_force_tls_local_dispatch_key_set(keys);
}

void see_operators() {
  auto keys = tls_local_dispatch_key_set();
  if (keys.excluded_.has(kLevelKey)) return;  // the node stays outside
  keys.included_ = (keys.included_ | kLevelKeySet) - kBackendSelect;
  c10::impl::_force_tls_local_dispatch_key_set(keys);
}

BelowLevels::BelowLevels()
    : ForceDispatchKeyGuard(below(put_right(tls_local_dispatch_key_set()))) {}

void stay_outside() {
  c10::impl::_force_tls_local_dispatch_key_set(below(tls_local_dispatch_key_set()));
}

struct BackendScope::Stacks {
  const std::vector<at::functorch::DynamicLayer> layers = at::functorch::getDynamicLayerStack();
  const TorchDispatchModeTLS modes = TorchDispatchModeTLS::get_state();
};

BackendScope::BackendScope() : keys_(tls_local_dispatch_key_set()) {
  if (TorchDispatchModeTLS::any_modes_set() || !at::functorch::getDynamicLayerStack().empty()) {
    stacks_ = std::make_unique<const Stacks>();
    at::functorch::setDynamicLayerStack({});
    TorchDispatchModeTLS::set_state({});
  }
  c10::impl::_force_tls_local_dispatch_key_set(keys_of_kernels());
}

BackendScope::~BackendScope() {
  if (stacks_) {
    at::functorch::setDynamicLayerStack(stacks_->layers);
    TorchDispatchModeTLS::set_state(stacks_->modes);
  }
  c10::impl::_force_tls_local_dispatch_key_set(keys_);
}

}  // namespace rematfn
