// SPDX-License-Identifier: Apache-2.0
//
// bindings_journal.cpp: journals, as Python sees them. Holds no logic.

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>

#include "engine/domain.h"
#include "engine/journal.h"
#include "python/bindings.h"
#include "python/places.h"

namespace py = pybind11;

namespace rematfn {
namespace {

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
    calls.append(py::make_tuple(journal.names[c.name], places[i], c.begun, c.ended, c.cost,
                                c.flops, c.needed, c.used, c.peak, c.replayable, c.backward,
                                c.reads));
  }
  columns["calls"] = calls;
  py::list values;
  for (const Journal::Value& v : journal.values) {
    values.append(py::make_tuple(v.nbytes, id_of(v.made_by), v.has_producer, id_of(v.cut_at), v.raw, v.kept, v.held));
  }
  columns["values"] = values;
  py::list begun;
  begun.append(py::make_tuple(journal.begun_at));
  columns["begun"] = begun;
  return columns;
}

}  // namespace

py::object read_journal(const Report& report) {
  if (!report.journal) return py::none();
  std::unique_ptr<Journal> copy;
  {
    const std::shared_ptr<Domain> owner = report.domain.lock();
    std::optional<DomainLock> lock;
    if (owner && !owner->lost_to_fork() && !owner->is_held_here()) lock.emplace(owner);
    copy = std::make_unique<Journal>(*report.journal);
  }
  return columns_of(*copy);
}

}  // namespace rematfn
