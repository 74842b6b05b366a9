// SPDX-License-Identifier: Apache-2.0
//
// bindings.cpp: with those beside it the only file that knows Python. Holds no logic.

#include <ATen/FuncTorchTLS.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <array>

#include "base/errors.h"
#include "base/interpreter.h"
#include "levels/boundary.h"
#include "levels/device_memory.h"
#include "levels/level.h"
#include "levels/pressure.h"
#include "operators/boxed_kernel.h"
#include "operators/raw_access.h"
#include "operators/write_watch.h"
#include "planning/program.h"
#include "python/bindings.h"
#include "tensors/disk.h"
#include "tensors/host.h"
#include "tensors/packed.h"
#include "tensors/layers.h"
#include "tensors/move.h"
#include "tensors/outside.h"
#include "tensors/thread_keys.h"

namespace py = pybind11;

namespace rematfn {
namespace {

// The Python classes, borrowed for the life of the process.
std::array<PyObject*, 3> errors{};  // by ErrorKind

// torch turns these into Python exceptions wherever an operator is called from.
struct PythonError final : torch::PyTorchError {
  PythonError(PyObject* kind, const std::string& message)
      : torch::PyTorchError(message), kind_(kind) {}
  PyObject* python_type() override { return kind_; }

 private:
  PyObject* kind_;
};

// The name of a folder may be any bytes.
std::string in_utf8(const std::string& message) {
  if (std::ranges::all_of(message, [](signed char each) { return each >= 0; })) return message;
  const py::gil_scoped_acquire gil;
  const auto length = static_cast<Py_ssize_t>(message.size());
  return py::reinterpret_steal<py::str>(PyUnicode_DecodeUTF8(message.data(), length, "backslashreplace"));
}

void raise_python(ErrorKind kind, const std::string& message) {
  throw PythonError(errors[static_cast<std::size_t>(kind)], in_utf8(message));
}

// See Note [Who waits does not hold the interpreter]
void* release_interpreter() {
  return Py_IsInitialized() != 0 && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr;
}

void acquire_interpreter(void* token) {
  PyEval_RestoreThread(static_cast<PyThreadState*>(token));
}

// See Note [Interrupts are served between replays]
void serve_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  python_error error;
  error.persist();
  throw std::move(error);
}

// Python's errors come as torch's class or as pybind's, depending on who has called Python.
bool asks_to_stop(const std::exception& error) {
  if (const auto* raised = dynamic_cast<const python_error*>(&error)) {
    const py::gil_scoped_acquire gil;
    return PyErr_GivenExceptionMatches(raised->type, PyExc_Exception) == 0;
  }
  const auto* raised = dynamic_cast<const py::error_already_set*>(&error);
  if (raised == nullptr) return false;
  const py::gil_scoped_acquire gil;
  return !raised->matches(PyExc_Exception);
}

void set_errors(const py::object& budget, const py::object& replay, const py::object& offload) {
  errors = {budget.inc_ref().ptr(), replay.inc_ref().ptr(), offload.inc_ref().ptr()};
  set_raiser(&raise_python);
}

PyObject* inner_tensors = nullptr;

std::vector<at::Tensor> ask_for_inner_tensors(const at::Tensor& tensor) {
  const py::gil_scoped_acquire gil;
  return py::cast<std::vector<at::Tensor>>(py::handle(inner_tensors)(tensor));
}

void set_inner_tensors(const py::object& function) {
  inner_tensors = function.inc_ref().ptr();
  set_unwrapper(&ask_for_inner_tensors);
}

Keeping make_keeping(bool products, const std::string& marks, const std::vector<std::string>& names) {
  static const std::unordered_map<std::string, Keeping::Marks> kinds{
      {"heeded", Keeping::Marks::kHeeded}, {"all", Keeping::Marks::kAll},
      {"only", Keeping::Marks::kOnly},       {"but", Keeping::Marks::kBut},
      {"all but", Keeping::Marks::kAllBut}};
  return {products, kinds.at(marks), names};
}

template <class T>
T field(const py::handle& given, const char* name) {
  return given.attr(name).cast<T>();
}

// What `LevelOptions` of rematfn/_transform/level.py says, by name.
LevelOptions options_from(const py::object& given) {
  const auto* program = field<const Program*>(given, "program");
  const auto known = field<std::shared_ptr<Trace>>(given, "known");
  const bool as_recorded = field<bool>(given, "as_recorded");
  return {.budget = field<std::optional<std::size_t>>(given, "budget").value_or(kNoBudget),
          .shared = field<std::shared_ptr<SharedBudget>>(given, "shared"),
          .policy = field<Policy>(given, "policy"),
          .timed = field<bool>(given, "timed"),
          .verify = field<bool>(given, "verify"),
          .name = field<std::string>(given, "name"),
          .max_operations = field<std::size_t>(given, "max_operations"),
          .record = field<bool>(given, "record"),
          .guide = program == nullptr ? nullptr : program->guide(as_recorded),
          .as_recorded = as_recorded,
          .fraction = field<double>(given, "fraction"),
          .is_estimate = field<bool>(given, "is_estimate"),
          .is_estimate_unguided = field<bool>(given, "is_estimate_unguided"),
          .known = program == nullptr || !as_recorded ? known : program->trace,
          .tiers = field<std::vector<std::shared_ptr<Tier>>>(given, "tiers"),
          .drops = field<bool>(given, "drops"),
          .leaves_early = field<bool>(given, "leaves_early"),
          .wording = {field<std::string>(given, "unit"), field<std::size_t>(given, "peak")},
          .most_replays = field<double>(given, "most_replays"),
          .where = field<bool>(given, "where")};
}

// Note [Levels are entered and left in C]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Python looks for signals after every call. Were a level pushed by one and popped in a `finally`, a
// KeyboardInterrupt between the call and the `try` would leave the level on the stack for good, and
// with it every later operator of the thread inside it. The interpreter does not look between
// `__enter__` and the block, nor between the block and `__exit__`, provided that both are in C.
class ActiveLevel {
 public:
  explicit ActiveLevel(LevelOptions options) : options_(std::move(options)) {}

  std::shared_ptr<LevelHandle> enter() {
    register_new_operators();
    return handle_ = push_level(options_);
  }

  void exit(const py::object& error, const py::object&, const py::object&) {
    const std::shared_ptr<LevelHandle> handle = std::move(handle_);
    const bool failed = PyErr_GivenExceptionMatches(error.ptr(), PyExc_Exception) != 0;
    const py::gil_scoped_release no_gil;
    end_level(*handle, error.is_none() ? Ending::kReturned
                       : failed        ? Ending::kFailed
                                       : Ending::kInterrupted);
  }

 private:
  const LevelOptions options_;
  std::shared_ptr<LevelHandle> handle_;
};

// A block whose operators no level sees.
class Outside {
 public:
  void enter() { scope_.emplace(); }
  void exit(const py::object&, const py::object&, const py::object&) { scope_.reset(); }

 private:
  std::optional<BelowLevels> scope_;
};

std::optional<std::size_t> if_any(std::size_t budget) {
  return budget == kNoBudget ? std::nullopt : std::optional(budget);
}

// It is called in the middle of an eviction: what it does with tensors, no level sees. It may be let
// go of by a thread that does not hold the interpreter.
CustomScore make_custom_score(const py::object& function) {
  if (function.is_none()) return nullptr;
  const std::shared_ptr<py::object> held(new py::object(function), [](py::object* object) {
    const py::gil_scoped_acquire gil;
    delete object;
  });
  return [held](const Considered& c) {
    const BelowLevels below;
    const py::gil_scoped_acquire gil;
    try {
      return py::cast<double>(
          (*held)(c.nbytes, c.cost, c.ancestors, c.descendants, c.age,
                  c.next_use == kUnknown ? py::none() : py::object(py::float_(c.next_use)),
                  c.consumed, std::string(c.producer)));
    } catch (py::error_already_set& raised) {
      raised.restore();
      python_error error;
      error.persist();
      throw std::move(error);
    }
  };
}

}  // namespace

py::dict record_of(const Statistics& s, std::size_t budget, std::size_t resident_bytes) {
  py::dict record;
  record["budget"] = py::cast(if_any(budget));
  record["peak_bytes"] = s.peak_bytes;
  record["unconstrained_bytes"] = s.unconstrained_bytes;
  record["resident_bytes"] = resident_bytes;
  record["operators"] = s.operators;
  record["evictions"] = s.evictions;
  record["replays"] = s.replays;
  record["replayed_cost"] = s.base_cost > 0 ? s.replayed_cost / s.base_cost : 0.0;
  record["replayed_flops"] = s.base_flops > 0 ? s.replayed_flops / s.base_flops : 0.0;
  record["min_budget"] = s.min_budget;
  record["moves"] = s.moves;
  record["returns"] = s.returns;
  record["late_returns"] = s.late_returns;
  record["turned_back"] = s.turned_back;
  record["moved_bytes"] = s.moved_bytes;
  record["returned_bytes"] = s.returned_bytes;
  record["waited"] = s.waited;
  return record;
}

}  // namespace rematfn

PYBIND11_MODULE(_C, m) {
  using namespace rematfn;
  const auto nogil = py::call_guard<py::gil_scoped_release>();

  set_interpreter({&release_interpreter, &acquire_interpreter, &serve_signals,
                   &asks_to_stop, &current_place, &describe});
  // See Note [Levels outlive the interpreter]
  py::module_::import("atexit").attr("register")(py::cpp_function(&empty_ready_queue));
  Py_AtExit(&hold_all_levels);
  m.attr("built_torch_version") = REMATFN_BUILT_TORCH;
  m.attr("dispatch_key") = c10::toString(kLevelKey);
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (PythonError& e) {
      PyErr_SetString(e.python_type(), e.what());
    }
  });

  py::class_<Keeping>(m, "Keeping")
      .def(py::init(&make_keeping), py::kw_only(), py::arg("products") = Keeping().products,
           py::arg("marks") = "heeded", py::arg("names") = Keeping().names);
  py::class_<Policy>(m, "Policy")
      .def(py::init([](const Keeping& keeping, const py::object& custom_score, bool evict_everything) {
             return Policy{Score(), keeping, make_custom_score(custom_score), evict_everything};
           }),
           py::kw_only(), py::arg("keeping") = Keeping(), py::arg("custom_score") = py::none(),
           py::arg("evict_everything") = Policy().evict_everything);
  py::class_<Report, std::shared_ptr<Report>>(m, "Report")
      .def("read", [](const Report& report) {
        py::dict record = record_of(report.read(), report.budget, report.bytes_now());
        if (report.budget == kNoBudget) record["min_budget"] = py::none();  // needs are not looked at
        return record;
      })
      .def("take_trace", &Report::take_trace, py::arg("waits") = true)
      // These wait for no other thread.
      .def_property_readonly("has_trace", [](const Report& report) { return report.trace != nullptr; })
      .def_property_readonly("budget", [](const Report& report) { return if_any(report.budget); })
      .def_property_readonly("unconstrained_bytes", [](const Report& report) {
        return static_cast<std::size_t>(report.unconstrained_bytes);
      })
      .def("journal", &read_journal)
      .def("is_over", &is_over)
      .def_readonly("guide_lost", &Report::guide_lost)
      .def_readonly("lost_at", &Report::lost_at)
      .def_readonly("neediest", &Report::neediest)
      .def_readonly("stopped", &Report::stopped);
  py::class_<LevelHandle, std::shared_ptr<LevelHandle>>(m, "Level")
      .def("report", [](const LevelHandle& handle) { return handle.level().report; })
      .def("discard", [](LevelHandle& handle, bool spare_kept) {
        const DomainLock lock(handle.level().domain);
        handle.level().domain->evictor.evict_all(handle.level(), spare_kept);
      }, nogil, py::arg("spare_kept") = true);
  py::class_<SharedBudget, std::shared_ptr<SharedBudget>>(m, "SharedBudget")
      .def(py::init<std::size_t>())
      .def("resident_bytes", &SharedBudget::resident_bytes)
      .def("peak_bytes", &SharedBudget::peak_bytes);
  py::class_<Tier, std::shared_ptr<Tier>>(m, "Tier")
      .def_readonly("for_accelerators", &Tier::for_accelerators)
      .def_property_readonly("packs", [](const Tier& tier) { return tier.link().packs; })
      .def("statistics", [](Tier& tier) {
        const TierFigures now = tier.figures();
        py::dict found;
        found["bytes_out"] = now.out.bytes;
        found["bytes_in"] = now.in.bytes;
        found["bandwidth_out"] = now.out.bandwidth;
        found["bandwidth_in"] = now.in.bandwidth;
        found["queued_bytes"] = now.out.queued + now.in.queued;
        found["held_bytes"] = now.held;
        found["peak_bytes"] = now.peak_held;
        found["pinned_bytes"] = now.pinned;
        found["capacity"] = now.capacity;
        found["waited"] = now.waited;
        found["trouble"] = in_utf8(now.trouble);
        return found;
      });
  m.def("link_to", &link_to, nogil);
  m.def("open_disk", [](const std::string& folder, std::size_t budget, bool verify, double bandwidth) {
    return make_disk({.folder = folder, .budget = budget, .verify = verify,
                      .transfers = {.bandwidth = bandwidth}});
  }, nogil);
  m.def("open_host", &make_host);
  m.def("open_packed", &make_packed);
  m.def("memory_left", &memory_left);
  m.def("workspace_bytes", &workspace_bytes);
  m.def("asks_for_room", [](const at::Device& device) { return asks_for_room(device.type()); });
  py::class_<ActiveLevel>(m, "ActiveLevel")
      .def(py::init([](const py::object& given) { return ActiveLevel(options_from(given)); }))
      .def("__enter__", &ActiveLevel::enter)
      .def("__exit__", &ActiveLevel::exit);
  py::class_<Outside>(m, "Outside")
      .def(py::init())
      .def("__enter__", &Outside::enter)
      .def("__exit__", &Outside::exit);
  m.def("hide_levels", &hide_levels);
  m.def("show_levels", &show_levels);
  m.def("stay_outside", &stay_outside);
  m.def("is_intercepting", &is_intercepting);
  bind_traces(m);
  bind_compiled(m);
  bind_places(m);
  m.def("set_errors", &set_errors);
  m.def("raise_quoted", &raise_quoted);
  m.def("format_bytes", [](std::size_t nbytes, const std::string& like) { return format_bytes(nbytes, {like}); },
        py::arg("nbytes"), py::arg("like") = "");
  m.def("set_inner_tensors", &set_inner_tensors);
  m.def("register_kernels", &register_kernels);
  m.def("hand_out", &hand_out, nogil);
  m.def("materialize", &materialize, nogil);
  m.def("materialize_storage", &materialize_storage, nogil);
  m.def("keep_storage", &keep_storage, nogil);
  // Where tensors have their bytes from, as storages take it: an address.
  m.def("cpu_allocator", [] { return reinterpret_cast<std::intptr_t>(c10::GetCPUAllocator()); });
  m.def("keep_bytes", &keep_bytes, nogil);
  m.def("note_array", &note_array, nogil);
  m.def("mark", &mark, nogil);
  m.def("share_handles",
        [](const std::vector<at::Tensor>& results, const std::vector<at::Tensor>& arguments) {
          share_handles(results, arguments);
        }, nogil);
  m.def("resize_if_known", &resize_if_known, nogil);
  m.def("note_move", &note_move, nogil);
  m.def("has_key", &has_key);
  m.def("knows_functorch", [] { return at::functorch::functorchTLSAccessor() != nullptr; });
  m.def("stack_depth", &stack_depth);
  bind_testing(m);
}
