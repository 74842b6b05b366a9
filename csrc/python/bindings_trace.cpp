// SPDX-License-Identifier: Apache-2.0
//
// bindings_trace.cpp: traces, journals, the simulator and plans, as Python sees them. Holds no logic.

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cmath>

#include "engine/domain.h"
#include "engine/journal.h"
#include "operators/footprint.h"
#include "planning/advice.h"
#include "planning/program.h"
#include "planning/search_thread.h"
#include "planning/simulation.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace rematfn {
namespace {

constexpr const char* kEventNames[] = {"call",      "release", "seal", "stored",    "filled",
                                       "addressed", "read",    "mark", "unrecorded"};

py::object data_of(const Trace& trace, const Trace::Event& event) {
  if (event.what == Trace::What::kMark) {
    const auto& [value, name] = trace.marks[event.index];
    return py::make_tuple(value, name);
  }
  if (event.what == Trace::What::kUnrecorded) return py::cast(trace.unrecorded[event.index]);
  if (event.what != Trace::What::kCall) return py::cast(event.index);
  const Trace::Call& call = trace.calls[event.index];
  py::list reads;
  py::list makes;
  for (const auto& [value, written] : call.reads) reads.append(py::make_tuple(value, written));
  for (const auto& [value, over] : call.makes) makes.append(py::make_tuple(value, over));
  return py::make_tuple(call.name, call.cost, call.flops, call.output_bytes, call.scratch_bytes,
                        call.replayable, call.raw, call.backward, reads, makes);
}

py::list events_of(const Trace& trace) {
  py::list events;
  for (const Trace::Event& event : trace.events) {
    const char* what = kEventNames[static_cast<std::size_t>(event.what)];
    events.append(py::make_tuple(what, data_of(trace, event)));
  }
  return events;
}

// The statistics and the calls that are replayed, in their order; or (a budget that would do, in words, unevictable
// bytes, whether it thrashes).
py::object simulate_trace(const std::shared_ptr<Trace>& trace, std::optional<std::size_t> budget,
                          const Policy& policy, const Program* program,
                          const std::string& unit, std::size_t peak) {
  Statistics statistics;
  Deeds deeds;
  const std::size_t bytes = budget.value_or(kNoBudget);
  SimulationOptions options{.budget = bytes, .policy = policy};
  try {
    const py::gil_scoped_release nogil;
    if (program != nullptr) options.guide = program->guide(program->trace == trace);
    statistics = simulate(*trace, options, &deeds);
  } catch (const NoRoom& why) {
    options.guide.reset();
    const Wording wording{unit, peak};
    Advice advice{figure_of(why.smallest_budget, wording)};
    if (!policy.custom_score) {
      const py::gil_scoped_release nogil;
      if (auto enough = enough_for(*trace, options, why.smallest_budget, wording)) {
        advice = {*std::move(enough), Advice::Covers::kAll};
      }
    }
    return py::make_tuple(advice.in_words(), why.unevictable, why.thrashing);
  }
  py::dict found = record_of(statistics, bytes, 0);
  py::list replays;
  for (const Replayed& replayed : deeds.replays) replays.append(replayed.call);
  found["replayed_calls"] = replays;
  return found;
}

std::shared_ptr<const OperatorFacts> facts_by(const std::string& name, const std::string& overload) {
  return facts_of(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()));
}

// Whether any run of an operator gives the bits of the first, whatever its arguments are, and a generator's
// state. See Note [Whether an untagged operator draws is observed]
bool has_one_result(const std::string& name, const std::string& overload, bool on_cpu) {
  const auto facts = facts_by(name, overload);
  const bool races = facts->races == Races::kByIndex || facts->races == Races::kOnThreads;
  return !facts->draws_random && (on_cpu || !facts->may_draw) && !facts->never_replayed && !facts->leaves_raw && !races;
}

// The FLOPs of an operator, and what the model gives it: `elements` are those of its largest result.
std::pair<double, double> modelled_cost_of(const std::string& name, const std::string& overload,
                                           const py::tuple& arguments, std::int64_t elements,
                                           std::size_t bytes_moved, const std::string& device,
                                           std::size_t itemsize) {
  c10::SmallVector<c10::IValue, 8> stack;  // as much as FLOPs depend on: tensors, and flags
  for (const py::handle argument : arguments) {
    c10::IValue& value = stack.emplace_back();
    if (THPVariable_Check(argument.ptr())) {
      value = THPVariable_Unpack(argument.ptr());
    } else if (py::isinstance<py::list>(argument)) {
      c10::List<bool> flags;
      for (const py::handle item : argument) flags.push_back(item.ptr() == Py_True);
      value = std::move(flags);
    }
  }
  const auto facts = facts_by(name, overload);
  const double flops = flops_of(*facts, stack, elements);
  return {flops, modelled_cost(flops, bytes_moved, c10::Device(device).type(), itemsize, facts->draws_random)};
}

// ---- journals ----------------------------------------------------------------------------------

py::object id_of(Journal::Id id) {
  return id == Journal::kNone ? py::object(py::none()) : py::cast(id);
}

constexpr const char* kWhat[] = {"made",   "dropped",     "moved",    "replayed", "returned",
                                 "turned back", "forgotten", "released", "left", "replay", "unrecorded"};

// Columns, each a list of tuples in the order of the fields in rematfn/_inspection/journal.py.
py::dict columns_of(const Journal& journal) {
  py::dict columns;
  py::list events;
  for (const Journal::Event& e : journal.events) {
    events.append(py::make_tuple(kWhat[static_cast<std::size_t>(e.what)], id_of(e.index),
                                 id_of(e.during), e.time, e.used, e.score));
  }
  columns["events"] = events;
  py::list calls;
  const std::vector<std::uint32_t> places = journal.places();
  for (std::size_t i = 0; i < journal.calls.size(); ++i) {
    const Journal::Call& c = journal.calls[i];
    calls.append(py::make_tuple(c.name, places[i], c.begun, c.ended, c.cost,
                                c.needed, c.used, c.peak, c.backward, c.reads));
  }
  columns["calls"] = calls;
  py::list values;
  for (const Journal::Value& v : journal.values) {
    values.append(py::make_tuple(v.nbytes, id_of(v.made_by), v.has_producer, id_of(v.cut_at), v.raw, v.kept, v.held));
  }
  columns["values"] = values;
  columns["begun"] = py::make_tuple(py::make_tuple(journal.begun_at));
  return columns;
}

}  // namespace

py::object read_journal(const Report& report) {
  if (!report.journal) return py::none();
  std::unique_ptr<Journal> copy;
  {
    const auto lock = report.lock();
    copy = std::make_unique<Journal>(*report.journal);
  }
  return columns_of(*copy);
}

void bind_traces(py::module_& m) {
  const auto nogil = py::call_guard<py::gil_scoped_release>();

  py::class_<Trace, std::shared_ptr<Trace>> trace(m, "Trace");
  for (const auto what : {Trace::What::kRelease, Trace::What::kSeal, Trace::What::kStored, Trace::What::kFilled,
                          Trace::What::kAddressed, Trace::What::kRead}) {
    const std::string name = std::string("add_") + kEventNames[static_cast<std::size_t>(what)];
    trace.def(name.c_str(), [what](Trace& to, Trace::Id value) { to.add(what, value); });
  }
  trace.def(py::init())
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
      .def("add_mark", &Trace::add_mark)
      .def("add_unrecorded", &Trace::add_unrecorded)
      .def("values",
           [](const Trace& trace) {
             std::vector<std::pair<std::size_t, bool>> values;
             for (const Trace::Value& value : trace.values) values.emplace_back(value.nbytes, value.counted);
             return values;
           })
      .def("events", &events_of)
      // Of each operator: as they were taken down, and by the cost model.
      .def("costs",
           [](const Trace& trace) {
             std::vector<std::pair<double, double>> costs;
             for (const Trace::Call& call : trace.calls) costs.emplace_back(call.cost, call.modelled);
             return costs;
           })
      // The same program, whose operators cost as much.
      .def("with_costs",
           [](const Trace& trace, const std::vector<double>& costs) {
             auto copy = std::make_shared<Trace>(trace);
             for (std::size_t i = 0; i < copy->calls.size(); ++i) copy->calls[i].cost = costs.at(i);
             return copy;
           })
      .def_property_readonly("operators", [](const Trace& trace) { return trace.calls.size(); })
      .def_property_readonly("result_bytes", &Trace::result_bytes)
      .def("check", &Trace::check);
  py::class_<LinkOptions>(m, "Link");
  py::class_<Program, std::shared_ptr<Program>>(m, "Program")
      .def(py::init([](std::shared_ptr<Trace> trace) {
        return std::make_shared<Program>(std::move(trace));
      }))
      .def("__copy__", [](const Program& program) { return std::make_shared<Program>(program); }, nogil)
      // With what was found for `like`, if given, before all others.
      .def(
          "search",
          [](Program& program, std::size_t budget, std::uint64_t in_vain, std::uint64_t in_all,
             const Program* like, const LinkOptions* link, const Policy* online, bool local) {
            std::shared_ptr<const Plan> start = like == nullptr ? nullptr : like->start_for(*program.trace);
            // A score of Python's is not for a thread without the interpreter.
            std::optional<Policy> simulable;
            if (online != nullptr && !online->custom_score) simulable = *online;
            const SearchLimits limits{in_vain, in_all, local};
            program.begin(
                budget, [=](Search& search) { search.try_settings(limits, start, simulable); },
                link == nullptr ? std::nullopt : std::optional(*link));
          },
          nogil, py::arg("budget"), py::arg("in_vain"), py::arg("in_all"),
          py::arg("like") = nullptr, py::arg("link") = nullptr, py::arg("online") = nullptr,
          py::arg("local") = true)
      .def("cut_into",
           [](Program& program, std::size_t budget, std::size_t segments) {
             program.begin(budget, [=](Search& search) { search.try_segments(segments); });
           },
           nogil)
      .def("cut_at_points",
           [](Program& program, std::size_t budget) {
             program.begin(budget, [](Search& search) { search.try_cut_points(); });
           },
           nogil)
      .def("note_same", &Program::note_same, nogil)
      .def("follow", &Program::follow, nogil, py::arg("alike") = true)
      .def("finish", &Program::finish, nogil)
      .def("is_settled", &Program::is_settled, nogil)
      // A budget from `least` on in which it replays at most so many times its cost, and in words.
      .def(
          "enough_for",
          [](const Program& program, const Policy& policy, std::size_t least, double most_replays,
             const LinkOptions* link, const std::string& unit, std::size_t of_peak) {
            SimulationOptions options{.policy = policy};
            const std::size_t most = std::max(simulate(*program.trace, options).peak_bytes, least);
            if (std::isfinite(most_replays)) options.most_overhead = most_replays * program.cost();
            if (link != nullptr) options.link = *link;
            const Wording wording{unit, of_peak};
            const auto enough = enough_for(*program.trace, options, least, wording);
            const Figure figure = enough && enough->bytes <= most ? *enough : figure_of(most, wording);
            return std::make_pair(figure.bytes, figure.text);
          },
          nogil, py::arg("policy"), py::arg("least"), py::arg("most_replays"), py::arg("link") = nullptr,
          py::arg("unit") = "", py::arg("peak") = 0)
      .def_property_readonly("writes_outside", &Program::writes_outside)
      .def_property_readonly("cost", &Program::cost)
      .def_property_readonly("budget", &Program::budget)
      .def_property_readonly("others_run_alike", &Program::others_run_alike)
      .def_property_readonly("elapsed", &Program::elapsed)
      .def("overhead", &Program::overhead);
  m.def("simulate", &simulate_trace);
  m.def("modelled_cost", &modelled_cost_of);
  m.def("has_one_result", &has_one_result);
  m.def("end_searches", &end_searches, nogil);
}

}  // namespace rematfn
