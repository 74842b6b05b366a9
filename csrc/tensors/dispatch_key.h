// SPDX-License-Identifier: Apache-2.0
//
// dispatch_key.h: the dispatch key we borrow, named once.
//
// Note [Which key we borrow]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~
// A level must see operators below autograd and below functorch's back mode, so that what those save
// is a level tensor, and above the backends. Of the keys between, CustomRNGKeyId is the one that
// core leaves alone ("intended for out of tree use"; nothing in 2.11 to 2.15 registers a fallback on
// it). Fake, torchdistx's old choice, is claimed by core since 2.13, and from 2.15 on view kernels
// assert on it. The key is below Python in every version: tensor subclasses and dispatch modes
// unwrap above us.
//
// Three consequences, dealt with where they bite:
//   - It is one of autograd's "other backends", so an operator's composite kernel beats a fallback;
//     an operator that no backend would decompose gets our kernel by itself (boxed_kernel.cpp).
//   - BackendSelect, which is above us, recomputes the key set of factories and so loses the
//     thread's included keys; it is not included while a level is active (thread_keys.cpp).
//   - View kernels copy a tensor's key set but not its backend meta, where our handle sits; our
//     kernel puts the handle on (level_results.cpp).

#pragma once

#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>

namespace rematfn {

inline constexpr c10::DispatchKey kLevelKey = c10::DispatchKey::CustomRNGKeyId;
inline constexpr c10::DispatchKeySet kLevelKeySet{kLevelKey};
inline constexpr c10::DispatchKeySet kBelowLevels{c10::DispatchKeySet::FULL_AFTER, kLevelKey};

// Everything that interprets operators above a level: what a factory, which is called from the top, must not go
// through again.
inline constexpr c10::DispatchKeySet kAboveLevels =
    c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
    c10::DispatchKeySet({
        c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
        c10::DispatchKey::FuncTorchDynamicLayerBackMode,
        c10::DispatchKey::FuncTorchBatched,
        c10::DispatchKey::FuncTorchVmapMode,
        c10::DispatchKey::FuncTorchGradWrapper,
        c10::DispatchKey::FuncTorchBatchedDecomposition,
        c10::DispatchKey::Batched,
        c10::DispatchKey::VmapMode,
        c10::DispatchKey::Functionalize,
        c10::DispatchKey::PythonTLSSnapshot,
        c10::DispatchKey::PythonDispatcher,
        c10::DispatchKey::PreDispatch,
        c10::DispatchKey::Python,
        c10::DispatchKey::Tracer,
    }) |
    kLevelKeySet;

}  // namespace rematfn
