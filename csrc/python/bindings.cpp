// SPDX-License-Identifier: Apache-2.0
//
// bindings.cpp: with bindings_trace.cpp the only file that knows Python. Holds no logic.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "base/errors.h"
#include "base/interpreter.h"
#include "levels/allocator.h"
#include "levels/boundary.h"
#include "levels/level.h"
#include "levels/pressure.h"
#include "levels/weight_cache.h"
#include "operators/boxed_kernel.h"
#include "operators/raw_access.h"
#include "operators/write_watch.h"
#include "planning/program.h"
#include "python/bindings.h"
#include "tensors/layers.h"

namespace py = pybind11;

namespace rematfn {
namespace {

// The Python classes, borrowed for the life of the process.
PyObject* budget_error = nullptr;
PyObject* replay_error = nullptr;

// torch turns these into Python exceptions wherever an operator is called from.
struct PythonError final : torch::PyTorchError {
  PythonError(PyObject* kind, const std::string& message)
      : torch::PyTorchError(message), kind_(kind) {}
  PyObject* python_type() override { return kind_; }

 private:
  PyObject* kind_;
};

void raise_python(ErrorKind kind, const std::string& message) {
  throw PythonError(kind == ErrorKind::kBudget ? budget_error : replay_error, message);
}

// See Note [Who waits does not hold the interpreter]
void* let_go_of_interpreter() {
  return Py_IsInitialized() != 0 && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr;
}

void take_interpreter_back(void* token) {
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

void set_errors(const py::object& budget, const py::object& replay) {
  budget_error = py::object(budget).release().ptr();
  replay_error = py::object(replay).release().ptr();
  set_raiser(&raise_python);
}

PyObject* inner_tensors = nullptr;

std::vector<at::Tensor> ask_for_inner_tensors(const at::Tensor& tensor) {
  const py::gil_scoped_acquire gil;
  return py::cast<std::vector<at::Tensor>>(py::handle(inner_tensors)(tensor));
}

void set_inner_tensors(const py::object& function) {
  inner_tensors = py::object(function).release().ptr();
  set_unwrapper(&ask_for_inner_tensors);
}

Score make_score(const std::string& kind, double ancestors, double exponent, double unread) {
  static const std::unordered_map<std::string, ScoreKind> kinds{
      {"on", ScoreKind::kOn},       {"dtr", ScoreKind::kDtr},   {"eq", ScoreKind::kEq},
      {"local", ScoreKind::kLocal}, {"msps", ScoreKind::kMsps}, {"lru", ScoreKind::kLru},
      {"largest", ScoreKind::kLargest}};
  return {kinds.at(kind), ancestors, exponent, unread, Horizon::kAge};
}

Keeping make_keeping(bool products, const std::string& marks, const std::vector<std::string>& names) {
  static const std::unordered_map<std::string, Keeping::Marks> kinds{
      {"heeded", Keeping::Marks::kHeeded}, {"all", Keeping::Marks::kAll},
      {"only", Keeping::Marks::kOnly},       {"but", Keeping::Marks::kBut},
      {"all but", Keeping::Marks::kAllBut}};
  return {products, kinds.at(marks), names};
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
    // Who interrupts does not want to wait for replays; an operator will still find the bytes.
    const bool failed = PyErr_GivenExceptionMatches(error.ptr(), PyExc_Exception) != 0;
    const bool ended = error.is_none();
    const py::gil_scoped_release no_gil;
    const std::string interleaved = pop_level(*handle);
    const bool lost = !interleaved.empty();
    if (!ended || lost) forget_leaves(handle->level());
    if (failed || lost) {
      hand_over(*handle, /*sealed=*/false);
      settle(*handle);
    }
    if (ended && lost) throw std::runtime_error(interleaved);
  }

 private:
  const LevelOptions options_;
  std::shared_ptr<LevelHandle> handle_;
};

std::shared_ptr<Trace> take_trace(Report& report) {
  if (const std::shared_ptr<Domain> domain = report.domain.lock()) {
    const DomainLock lock(domain);
    if (domain->recorder && domain->recorder->trace == report.trace) domain->recorder.reset();
    return std::move(report.trace);
  }
  return std::move(report.trace);
}

// Whether nothing runs in the level, and no graph can ask it for a replay any more.
bool is_over(const Report& report) {
  const std::shared_ptr<Domain> domain = report.domain.lock();
  if (!domain || domain->lost_to_fork()) return true;
  const DomainLock lock(domain);
  const auto& levels = static_cast<TensorDomain&>(*domain).levels;
  const auto is_active = [](const Table* level) { return bool{static_cast<const Level*>(level)->active}; };
  return domain->live_operations == 0 && std::none_of(levels.begin(), levels.end(), is_active);
}

// A block whose operators no level sees.
class Outside {
 public:
  void enter() { scope_.emplace(); }
  void exit(const py::object&, const py::object&, const py::object&) { scope_.reset(); }

 private:
  std::optional<BelowLevels> scope_;
};

}  // namespace

py::dict record_of(const Statistics& s, std::size_t budget, std::size_t resident_bytes) {
  py::dict record;
  record["budget"] = budget == kNoBudget ? py::object(py::none()) : py::cast(budget);
  record["peak_bytes"] = s.peak_bytes;
  record["unconstrained_bytes"] = s.unconstrained_bytes;
  record["resident_bytes"] = resident_bytes;
  record["operators"] = s.operators;
  record["evictions"] = s.evictions;
  record["replays"] = s.replays;
  record["replayed_cost"] = s.base_cost > 0 ? s.replayed_cost / s.base_cost : 0.0;
  record["replayed_flops"] = s.base_flops > 0 ? s.replayed_flops / s.base_flops : 0.0;
  record["min_budget"] = s.min_budget;
  return record;
}

// It is called in the middle of an eviction: what it does with tensors, no level sees. It may be let
// go of by a thread that does not hold the interpreter.
Judge make_judge(const py::object& function) {
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
          (*held)(c.nbytes, c.cost, c.ancestors, c.age,
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

}  // namespace rematfn

PYBIND11_MODULE(_C, m) {
  using namespace rematfn;
  const auto nogil = py::call_guard<py::gil_scoped_release>();

  set_interpreter({&let_go_of_interpreter, &take_interpreter_back, &serve_signals,
                   &asks_to_stop});
  m.attr("built_torch_version") = REMATFN_BUILT_TORCH;
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (PythonError& e) {
      PyErr_SetString(e.python_type(), e.what());
    }
  });

  py::class_<Report, std::shared_ptr<Report>>(m, "Report")
      .def("read", [](const Report& report) {
        py::dict record = record_of(report.read(), report.budget, report.bytes_now());
        if (report.budget == kNoBudget) record["min_budget"] = py::none();  // needs are not looked at
        return record;
      })
      // What was recorded; recording ends. None if the level did not record, or was asked before.
      .def("take_trace", &take_trace)
      .def("is_over", &is_over)
      .def_readonly("guide_lost", &Report::guide_lost);
  py::class_<LevelHandle, std::shared_ptr<LevelHandle>>(m, "Level")
      .def("report", [](const LevelHandle& handle) { return handle.level().report; })
      .def("discard", [](LevelHandle& handle) {
        const DomainLock lock(handle.level().domain);
        handle.level().domain->evictor.evict_all(handle.level(), /*spare_kept=*/true);
      }, nogil)
      .def("evict", [](LevelHandle& handle) {
        const DomainLock lock(handle.level().domain);
        handle.level().domain->evictor.evict_all(handle.level());
      }, nogil);
  py::class_<SharedBudget, std::shared_ptr<SharedBudget>>(m, "SharedBudget")
      .def(py::init<std::size_t>())
      .def("resident_bytes", &SharedBudget::resident_bytes)
      .def("peak_bytes", &SharedBudget::peak_bytes);
  py::class_<ActiveLevel>(m, "ActiveLevel")
      .def(py::init([](std::optional<std::size_t> budget, std::shared_ptr<SharedBudget> shared,
                       const Score& score, const Keeping& keeping, const py::object& judge,
                       bool evict_everything, bool timed, bool verify, const std::string& name,
                       std::size_t max_operations, bool record, const Program* program,
                       double fraction, bool is_estimate, bool is_estimate_unguided) {
        return ActiveLevel({budget.value_or(kNoBudget), std::move(shared), score, keeping,
                            make_judge(judge), evict_everything, timed, verify, name,
                            max_operations, record,
                            program == nullptr ? nullptr : program->guide(), fraction, is_estimate,
                            is_estimate_unguided,
                            program == nullptr ? nullptr : program->trace});
      }))
      .def("__enter__", &ActiveLevel::enter)
      .def("__exit__", &ActiveLevel::exit);
  py::class_<Outside>(m, "Outside")
      .def(py::init())
      .def("__enter__", &Outside::enter)
      .def("__exit__", &Outside::exit);
  m.def("stay_outside", &stay_outside);
  m.def("is_intercepting", &is_intercepting);
  py::class_<Score>(m, "Score").def(py::init(&make_score));
  py::class_<Keeping>(m, "Keeping").def(py::init(&make_keeping));
  bind_traces(m);
  m.def("set_errors", &set_errors);
  m.def("raise_quoted", &raise_quoted);
  m.def("last_message", &last_message);
  m.def("set_inner_tensors", &set_inner_tensors);
  m.def("register_kernels", &register_kernels);
  m.def("hand_over", [](LevelHandle& handle, bool sealed) { hand_over(handle, sealed); }, nogil);
  m.def("seal", [](const at::Tensor& t, LevelHandle& handle) { seal(t, handle.level()); }, nogil);
  m.def("seal_leaf_gradients",
        [](LevelHandle& handle) { seal_leaf_gradients(handle.level()); }, nogil);
  m.def("seal_cached_casts",
        [](LevelHandle& handle) { seal_cached_casts(handle.level()); }, nogil);
  py::class_<Candidate>(m, "Candidate")
      .def(py::init([](double nbytes, double cost, double neighbours, double last_access,
                       bool consumed, bool pinned, bool pending) {
        return Candidate{.nbytes = nbytes,
                         .cost = cost,
                         .neighbours = neighbours,
                         .last_access = last_access,
                         .consumed = consumed,
                         .pinned = pinned,
                         .pending = pending};
      }));
  m.def("score", [](const std::string& kind, const Candidate& candidate, double now) {
    return score(make_score(kind, 0.5, 0.6, 4), candidate, now);
  });
  // `neighbours`, by candidate, is what it would take to walk the graph for.
  m.def("choose_victims", [](const std::string& kind, std::vector<Candidate> candidates, double now,
                             bool spare_pending, std::size_t most,
                             const std::vector<double>& neighbours) {
    std::vector<std::size_t> refreshed;
    const Victims victims =
        choose_victims(make_score(kind, 0.5, 0.6, 4), candidates, now, spare_pending, most,
                       [&](std::size_t i) {
                         candidates[i].neighbours = neighbours.at(i);
                         refreshed.push_back(i);
                       });
    return std::tuple(victims.indices, victims.lowest_left, refreshed);
  });
  m.def("materialize", [](const at::Tensor& tensor) { materialize(tensor); }, nogil);
  m.def("materialize_together",
        [](const std::vector<at::Tensor>& tensors, const std::string& reader) {
          materialize(tensors, reader);
        }, nogil);
  m.def("evict", &evict, nogil);
  m.def("mark", &mark, nogil);
  m.def("share_handles",
        [](const std::vector<at::Tensor>& results, const std::vector<at::Tensor>& arguments) {
          share_handles(results, arguments);
        }, nogil);
  m.def("resize_if_known", &resize_if_known, nogil);
  m.def("note_move", &note_move, nogil);
  m.def("has_key", &has_key);
  m.def("memory_left", &memory_left);
  m.def("fail_allocation", &fail_allocation);
  m.def("use_pages", &use_pages);
  // Bytes live and waiting in the pool of pages, and addresses reserved.
  m.def("pages", [] {
    const Pages::Usage usage = pages().usage();
    return std::tuple(usage.live, usage.waiting, usage.reserved);
  });
  m.def("give_back_pages", [] { pages().give_back_kept(); });
  m.def("pretend_memory_left", &pretend_memory_left);
  m.def("check", [] {
    check_all();
    pages().check();
  }, nogil);
  m.def("live_levels", &live_levels, nogil);
  m.def("live_operations", &live_operations, nogil);
  m.def("stack_depth", &stack_depth);
}
