// SPDX-License-Identifier: Apache-2.0
//
// raw_access.h: bytes that are read behind the dispatcher.
//
// Note [What is asked before bytes are read]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// `numpy()` and `tolist()` (and so `repr`) take an address and read. No operator does that reading;
// an evicted tensor has nothing there, and c10 offers no way to step in but an error. But what comes
// just before goes through the dispatcher, and makes the tensor resident:
//   - `detach`, before `numpy()`. A view otherwise touches no bytes, but few programs detach what
//     they then do not read.
//   - `resolve_conj` and `resolve_neg`, before `tolist()`. They decompose above us, so they have
//     kernels of ours among autograd's.
//   - `is_pinned`, before `torch.from_dlpack` asks for the address, which it keeps. The version is
//     kept too, where it is.
//   - `sparse_coo_tensor` without a size decomposes above us as well, into operators whose results it
//     reads. A kernel of ours has it find the size where no level sees it.
// No operator runs between these and the reading, so nothing is evicted again meanwhile. A storage in
// Python's hands tells us (Note [A storage that is read comes back]), and so does a tensor that is asked
// for its address (Note [An address that was asked for stays good]). What asks nothing (C++ code, a
// DLPack capsule) gets an error that says what to do.
// Such a read is in the record. To accumulate a gradient is to detach it first. If the record did not say
// so, a schedule would evict a gradient that no operator reads, and the call would replay all that it is
// made from.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <string>
#include <vector>

#include "engine/domain.h"
#include "tensors/level_tensor.h"

namespace rematfn {

// Makes the bytes of level tensors resident, which `reader` needs together.
void materialize(const std::vector<at::Tensor>& tensors, const std::string& reader);
// The same, and what they hold is never replayed from now on.
// If `addressed`, it is never moved either.
void keep_bytes(const std::vector<at::Tensor>& tensors, const std::string& reader, bool addressed);

// `materialize` of a storage, if a level has evicted it.
void materialize_storage(const c10::Storage& storage);
// `keep_bytes` of a storage that some level has: somebody writes there by no operator, or has the address.
void keep_storage(const c10::Storage& storage);

// Somebody has an array of a level tensor. See Note [Arrays are seldom written]
void note_array(const at::Tensor& tensor);

// `version` holds what its producer need not have made: never replayed from now on, in the record neither.
void keep_contents(Domain& domain, Version& version);

}  // namespace rematfn
