// SPDX-License-Identifier: Apache-2.0
//
// bindings_testing.cpp: hooks for tests and measurements, as Python sees them. Holds no logic.

#include <torch/csrc/utils/pybind.h>

#include "base/errors.h"
#include "engine/domain.h"
#include "levels/allocator.h"
#include "levels/device_memory.h"
#include "levels/level.h"
#include "levels/pressure.h"
#include "memory/pages.h"
#include "planning/program.h"
#include "planning/search_thread.h"
#include "python/bindings.h"
#include "tensors/host.h"
#include "tensors/packed.h"
#include "tensors/layers.h"

namespace py = pybind11;

namespace rematfn {
namespace {

// What `what` returns for the contents of a level tensor, under the lock; false if it is none.
template <class What>
bool with_contents(const at::Tensor& tensor, const What& what) {
  bool found = false;
  with_cell(innermost(tensor), [&](Cell& cell) { found = what(*cell.level->domain, *cell.version); });
  return found;
}

}  // namespace

void bind_testing(py::module_& core) {
  const auto nogil = py::call_guard<py::gil_scoped_release>();
  py::module_ m = core.def_submodule("testing", "For tests and measurements alone.");

  // What is there.
  m.def("check", [] {
    for_each_live_domain([](TensorDomain& domain) {
      for (const Table* level : domain.levels) level->check();
    });
  }, nogil);
  m.def("live_levels", [] {
    std::size_t count = 0;
    for_each_live_domain([&](TensorDomain& domain) {
      for (const Table* level : domain.levels) {
        count += static_cast<const Level*>(level)->active || level->oldest != nullptr;
      }
    });
    return count;
  }, nogil);
  m.def("live_operations", [] {
    std::size_t count = 0;
    for_each_live_domain([&](TensorDomain& domain) { count += domain.live_operations; });
    return count;
  }, nogil);
  m.def("is_searching", &is_searching);
  m.def("kept", [](const Program& program) { return program.plan().kept; });
  m.def("replays_scheduled", [](const Program& program) {
    const auto schedule = program.plan().schedule;
    return schedule ? schedule->replays.items().size() : 0;
  });
  m.def("simulated", [](const Program& program) {
    const std::lock_guard guard(plans_mutex());
    return program.begun()->simulated();
  });
  m.def("last_message", &last_message);

  // What is to happen.
  m.def("evict", [](const at::Tensor& tensor) {
    return with_contents(tensor, [](Domain& domain, Version& version) {
      return domain.evictor.evict_if_free(version);
    });
  }, nogil);
  // What is under way has arrived, or gone back.
  m.def("end_moves", [](const at::Tensor& tensor) {
    return with_contents(tensor, [](Domain& domain, Version&) {
      domain.end_moves(*domain.root);
      return true;
    });
  }, nogil);
  m.def("begin_to_fetch", [](const at::Tensor& tensor) {
    return with_contents(tensor, [](Domain& domain, Version& version) {
      if (version.place() != Place::kAway || version.copied_by() == nullptr) return false;
      domain.begin_to_fetch(version, /*wanted=*/true);
      return true;
    });
  }, nogil);
  // By device: the streams that a host's copies out and in run on.
  m.def("streams_of", &streams_of);
  m.def("draw_link_costs", &Link::draw_costs);
  m.def("pack_everything", &pack_everything);
  m.def("use_pages", &use_pages);
  m.def("give_back_pages", [] { pages().give_back(); });
  m.def("fail_allocation", &fail_allocation);
  // The address of what a device of tests calls for each block that is given back.
  m.def("have_asked", [] {
    return reinterpret_cast<std::uintptr_t>(
        have_asked(c10::kPrivateUse1, *c10::GetAllocator(c10::kPrivateUse1)));
  });
  m.def("pretend_memory_left", &pretend_memory_left);
}

}  // namespace rematfn
