// SPDX-License-Identifier: Apache-2.0
//
// bindings.h: what the files that know Python share.

#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <string>

#include "engine/report.h"

namespace rematfn {

// The fields of Stats.
[[nodiscard]] pybind11::dict record_of(const Statistics& statistics, std::size_t budget,
                                       std::size_t resident_bytes);

// What a call's journal says; None: it has none.
[[nodiscard]] pybind11::object read_journal(const Report& report);

// Where in the program this thread is, which may hold the interpreter's lock or not. 0: no such frame.
[[nodiscard]] std::uint32_t current_place();
[[nodiscard]] std::string describe(std::uint32_t place);

void bind_places(pybind11::module_& m);
void bind_traces(pybind11::module_& m);
void bind_compiled(pybind11::module_& m);
void bind_testing(pybind11::module_& m);  // _C.testing

}  // namespace rematfn
