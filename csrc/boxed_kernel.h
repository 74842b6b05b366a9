// SPDX-License-Identifier: Apache-2.0
//
// boxed_kernel.h: the one kernel that every operator passes while a level is active.

#pragma once

namespace rematfn {

// Registers the kernel with the dispatcher; inert until a level is pushed. Once per process.
void register_kernels();
// Registers it for operators defined since.
void register_new_operators();

}  // namespace rematfn
