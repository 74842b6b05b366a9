// SPDX-License-Identifier: Apache-2.0
//
// interpreter_end.h: what becomes of levels that are still there when the interpreter ends.
//
// Note [Levels outlive the interpreter]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A backward that ends with an exception (Ctrl-C, which we serve between replays; a budget that is too
// small) leaves the nodes that were ready in a queue of their thread's, with their graph and with the
// gradients on their way. The main thread's queue is destroyed after the interpreter has gone, and static
// objects even later. Were a level to die with them, it would let go of storages from outside; and one that
// is a NumPy array's (`from_numpy`, `from_dlpack`, `frombuffer`), or a score written in Python, takes the
// interpreter's lock for that: the process would end with a segmentation fault.
//   1. While the interpreter still runs, at its exit handlers, the main thread's queue is replaced by an
//      empty one. Nobody can run what was in it: its backward is over. So goes what torch has saved there,
//      too, which no level may know any more.
//   2. When the interpreter has gone, every domain's lock is taken and never let go of. Whatever is dropped
//      from then on waits in the lock's queue, storage and all: Note [The program may drop a tensor at any
//      time]. So levels let go of nothing, and what they hold, torch's own references cannot free either.

#pragma once

namespace rematfn {

// On the main thread, which is in no backward.
void empty_ready_queue();
// The rest of the process runs without the interpreter.
void hold_all_levels();

}  // namespace rematfn
