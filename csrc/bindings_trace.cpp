// SPDX-License-Identifier: Apache-2.0
//
// bindings_trace.cpp: traces, the simulator and plans, as Python sees them. Holds no logic.

#include <torch/csrc/utils/pybind.h>

#include <chrono>

#include "advice.h"
#include "bindings.h"
#include "domain.h"
#include "plan.h"
#include "simulation.h"

namespace py = pybind11;

namespace rematfn {
namespace {

py::list events_of(const Trace& trace) {
  py::list events;
  for (const Trace::Event& event : trace.events) {
    if (event.what == Trace::What::kMark) {
      const auto& [value, name] = trace.marks[event.index];
      events.append(py::make_tuple("mark", py::make_tuple(value, name)));
      continue;
    }
    if (event.what == Trace::What::kUnrecorded) {
      events.append(py::make_tuple("unrecorded", trace.unrecorded[event.index]));
      continue;
    }
    if (event.what != Trace::What::kCall) {
      const char* what = event.what == Trace::What::kSeal     ? "seal"
                         : event.what == Trace::What::kSettle ? "settle"
                                                              : "release";
      events.append(py::make_tuple(what, event.index));
      continue;
    }
    const Trace::Call& call = trace.calls[event.index];
    py::list reads;
    py::list makes;
    for (const auto& [value, written] : call.reads) reads.append(py::make_tuple(value, written));
    for (const auto& [value, over] : call.makes) makes.append(py::make_tuple(value, over));
    events.append(py::make_tuple(
        "call", py::make_tuple(call.name, call.cost, call.flops, call.output_bytes,
                               call.scratch_bytes, call.replayable, call.raw, call.backward, reads,
                               makes)));
  }
  return events;
}

// For as long as each `seconds` bring a plan that replays a hundredth less, `most_seconds` in all; or,
// if not negative, for `runs` plans.
GoOn while_it_pays(double seconds, double most_seconds, std::int64_t runs) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  return [=, last_gain = start, reached = kNever](double replayed_cost) mutable {
    constexpr double kGain = 0.01;
    const auto now = Clock::now();
    if (replayed_cost < (1 - kGain) * reached) {
      reached = replayed_cost;
      last_gain = now;
    }
    const auto has_passed = [now](Clock::time_point since, double limit) {
      return std::chrono::duration<double>(now - since).count() >= limit;
    };
    return !has_passed(last_gain, seconds) && !has_passed(start, most_seconds) && runs-- != 0;
  };
}

// The statistics, or (a budget that would do, unevictable bytes, whether it thrashes).
py::object simulate_trace(const std::shared_ptr<Trace>& trace, std::optional<std::size_t> budget,
                          const Score& score, const Keeping& keeping, const py::object& judge,
                          bool evict_everything, const Program* program) {
  Statistics statistics;
  const std::size_t bytes = budget.value_or(kNoBudget);
  SimulationOptions options{bytes, score, keeping, make_judge(judge), evict_everything};
  try {
    const py::gil_scoped_release nogil;
    if (program != nullptr) options.guide = program->guide();
    statistics = simulate(*trace, options);
  } catch (const NoRoom& why) {
    options.guide.reset();
    const auto enough = judge.is_none() ? enough_for(*trace, options, why.smallest_budget)
                                        : std::optional<std::size_t>();
    return py::make_tuple(enough.value_or(why.smallest_budget), why.unevictable, why.thrashing);
  }
  return record_of(statistics, bytes, 0);
}

}  // namespace

void bind_traces(py::module_& m) {
  const auto nogil = py::call_guard<py::gil_scoped_release>();

  py::class_<Trace, std::shared_ptr<Trace>>(m, "Trace")
      .def(py::init())
      .def("add_value", &Trace::add_value)
      .def("add_call",
           [](Trace& trace, const std::string& name, double cost, double flops,
              std::size_t output_bytes, std::size_t scratch_bytes, bool replayable, bool raw,
              bool backward,
              const std::vector<std::pair<Trace::Id, bool>>& reads,
              const std::vector<std::pair<Trace::Id, std::int32_t>>& makes) {
             Trace::Call call(name, {.cost = cost,
                                     .flops = flops,
                                     .output_bytes = output_bytes,
                                     .scratch_bytes = scratch_bytes,
                                     .replayable = replayable,
                                     .raw = raw,
                                     .backward = backward});
             for (const auto& [value, written] : reads) call.reads.push_back({value, written});
             for (const auto& [value, over] : makes) call.makes.push_back({value, over});
             trace.add_call(std::move(call));
           })
      .def("add_release", &Trace::add_release)
      .def("add_seal", &Trace::add_seal)
      .def("add_settle", &Trace::add_settle)
      .def("add_mark", &Trace::add_mark)
      .def("add_unrecorded", &Trace::add_unrecorded)
      .def("values",
           [](const Trace& trace) {
             std::vector<std::pair<std::size_t, bool>> values;
             for (const auto& [nbytes, counted] : trace.values) values.emplace_back(nbytes, counted);
             return values;
           })
      .def("events", &events_of)
      .def("check", &Trace::check);
  py::class_<Program, std::shared_ptr<Program>>(m, "Program")
      .def(py::init([](std::shared_ptr<Trace> trace) {
        return std::make_shared<Program>(std::move(trace));
      }))
      .def(
          "search",
          [](Program& program, std::size_t budget, double seconds, double most_seconds,
             std::int64_t runs) {
            return program.search(budget, Strategy::kBest, 0,
                                  while_it_pays(seconds, most_seconds, runs));
          },
          nogil)
      .def(
          "cut_into",
          [](Program& program, std::size_t budget, std::size_t segments) {
            return program.search(budget, Strategy::kSegments, segments, {});
          },
          nogil)
      .def(
          "cut_at_points",
          [](Program& program, std::size_t budget) {
            return program.search(budget, Strategy::kCutPoints, 0, {});
          },
          nogil)
      .def("kept", [](const Program& program) { return program.plan().kept; })
      .def("replayed_cost", [](const Program& program) { return program.plan().replayed_cost; });
  m.def("simulate", &simulate_trace);
}

}  // namespace rematfn
