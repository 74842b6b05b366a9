// SPDX-License-Identifier: Apache-2.0
//
// kernels_above.h: kernels of torch's whose turn comes before a level's, and what we put around them.
//
// Note [Kernels above a level]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Some kernels run without our key's turn having come, and read the bytes of level tensors, evicted
// or not. Around each of them goes one of ours, which asks the level first.
//   1. Sparse, nested and mkldnn tensors have keys above ours. `torch.mm(a, x)` with a sparse `a`
//      reads the dense x, `x.add_(a)` writes it. Theirs then is to the level what the kernel below
//      is otherwise: an operator with an argument that is no plain tensor, whose results are kept.
//      The tensors that such an argument consists of are operands. A level tensor that becomes part of
//      one (`torch.sparse_coo_tensor(indices, x)`, the scales of a quantised tensor) is given away: much
//      reads a part without an operator, as torch does the sizes of a nested tensor. So is one that a
//      script object may have taken in, which cannot be asked what it consists of.
//      To ask a nested tensor for its sizes is no operator: autograd does where it may not throw.
//   2. A few operators decompose, which happens above us, and on the way read an integer tensor to
//      know what to do: `tensor_split(x, indices)`, `ctc_loss` with tensors of lengths, an LSTM over
//      a packed sequence. Integers among their arguments are made resident and are held until they
//      are done; and so are those they make meanwhile (`lengths.to(long)`).
//   3. Others are composite in name only: they clone or allocate, take the addresses, and do all the work
//      themselves, as Sobol engines do. What they write no operator tells of, and a replay would not
//      write it. Each of them is one operator of the level, as it is one kernel; unless a derivative is
//      wanted, or somebody above would not see what it decomposes into. max_pool1d then is made of
//      operators that need nothing; what the others are given, and make, stays as in 4.
//   4. Some pack a matrix for fbgemm. Their result is an object of C++'s in the place of bytes, which
//      may refer to the arguments: none of these is evicted, moved, or made again.
// Those that no list has show where all is evicted: they find no bytes, or what they wrote is gone.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "tensors/level_tensor.h"

namespace rematfn {

void register_kernels_above();

// One of ours, which may run the kernel that it is registered in the place of.
using KernelAround = void (*)(const c10::SafeKernelFunction& theirs, const c10::OperatorHandle& op,
                              c10::DispatchKeySet keys, torch::jit::Stack* stack);
void put_around(const c10::OperatorHandle& op, c10::DispatchKey key, KernelAround kernel);
// One that does nothing else: no other registration changes then what is done at the key.
void run_theirs(const c10::SafeKernelFunction& theirs, const c10::OperatorHandle& op,
                c10::DispatchKeySet keys, torch::jit::Stack* stack);

// Called for each result that a level records, with the domain's lock held.
void hold_if_asked(const Ref<TensorVersion>& version, caffe2::TypeMeta dtype);

}  // namespace rematfn
