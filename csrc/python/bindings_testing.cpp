// SPDX-License-Identifier: Apache-2.0
//
// bindings_testing.cpp: hooks for tests and measurements, as Python sees them. Holds no logic.

#include <torch/csrc/utils/pybind.h>

#include "base/errors.h"
#include "engine/domain.h"
#include "levels/allocator.h"
#include "levels/boundary.h"
#include "levels/level.h"
#include "levels/pressure.h"
#include "planning/program.h"
#include "planning/search_thread.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace rematfn {

void bind_testing(py::module_& core) {
  const auto nogil = py::call_guard<py::gil_scoped_release>();
  py::module_ m = core.def_submodule("testing", "For tests and measurements alone.");

  // What is there.
  m.def("check", [] {
    check_all();
    pages().check();
  }, nogil);
  m.def("live_levels", &live_levels, nogil);
  m.def("live_operations", &live_operations, nogil);
  // Bytes live and waiting in the pool of pages, and addresses reserved.
  m.def("pages", [] {
    const Pages::Usage usage = pages().usage();
    return std::tuple(usage.live, usage.waiting, usage.reserved);
  });
  m.def("memory_left", &memory_left);
  m.def("is_searching", &is_searching);
  m.def("kept", [](const Program& program) { return program.plan().kept; });
  m.def("last_message", &last_message);

  // What is to happen.
  m.def("evict", &evict, nogil);
  m.def("evict_all", [](LevelHandle& handle) {
    const DomainLock lock(handle.level().domain);
    handle.level().domain->evictor.evict_all(handle.level());
  }, nogil);
  m.def("use_pages", &use_pages);
  m.def("give_back_pages", [] { pages().give_back_kept(); });
  m.def("fail_allocation", &fail_allocation);
  m.def("pretend_memory_left", &pretend_memory_left);
}

}  // namespace rematfn
