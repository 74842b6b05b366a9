// SPDX-License-Identifier: Apache-2.0
//
// places.h: where in the user's program a thread is.
//
// Note [A place is a line and a module]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Of the frames on a thread's stack the innermost is meant that is neither torch's nor ours nor of
// Python's library: the line that a user can change. A line in a module's `forward` runs for every
// block of a model, so the path of the module whose `forward` runs belongs to the place; hooks that
// torch calls around each `forward` say which that is. A place is a number; what it stands for is
// looked at when somebody reads it. The same place has the same number every time.

#pragma once

#include <cstdint>
#include <string>

#include <torch/csrc/utils/pybind.h>

namespace rematfn {

// Of this thread, which may hold the interpreter's lock or not. 0: no such frame.
[[nodiscard]] std::uint32_t current_place();
[[nodiscard]] std::string describe(std::uint32_t place);

void bind_places(pybind11::module_& m);

}  // namespace rematfn
