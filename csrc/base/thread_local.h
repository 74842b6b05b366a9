// SPDX-License-Identifier: Apache-2.0
//
// thread_local.h: a thread's variables that each operator asks for.
//
// The usual way from a library to a thread's variable is a call; at a fixed place it is none. Such
// places come from a store that all libraries share which are loaded while the program runs. A library
// that uses one takes room there for all its variables, whichever way it finds them: half a KiB of ours.
// What torch or the standard library declare is none of ours, and not to be compiled like this.

#pragma once

#define REMATFN_THREAD_LOCAL constinit thread_local __attribute__((tls_model("initial-exec")))
