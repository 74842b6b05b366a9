// SPDX-License-Identifier: Apache-2.0
//
// places.cpp: where in the user's program a thread is.
//
// Note [A place is a line and a module]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Of the frames on a thread's stack the innermost is meant that is neither torch's nor ours nor of
// Python's library: the line that a user can change. A line in a module's `forward` runs for every
// block of a model, so the path of the module whose `forward` runs belongs to the place; hooks that
// torch calls around each `forward` say which that is. A place is a number; what it stands for is
// looked at when somebody reads it. The same place has the same number every time.
#include "python/bindings.h"

#include <frameobject.h>

#include <map>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace py = pybind11;

namespace rematfn {
namespace {

struct SourcePlace {
  std::string file;
  std::string function;
  int line;
  std::string module;
};

// All under the interpreter's lock.
struct Places {
  std::vector<std::string> libraries;          // folders whose frames are passed over
  std::unordered_map<PyObject*, bool> is_users;  // by code object, which is kept
  std::map<std::tuple<PyObject*, int, std::string>, std::uint32_t> numbers;
  std::vector<SourcePlace> all{{}};
};

Places& places = *new Places;  // outlives the interpreter

thread_local std::vector<std::string> modules_around;

// A path may have bytes that are no characters, which no other encoding takes.
std::string text_of(const py::object& text) {
  return py::cast<std::string>(text.attr("encode")("utf-8", "backslashreplace"));
}

std::string text_of(PyObject* owner, const char* name) {
  return text_of(py::handle(owner).attr(name));
}

bool is_users(PyObject* code) {
  auto& known = places.is_users;
  if (const auto found = known.find(code); found != known.end()) return found->second;
  const std::string file = text_of(code, "co_filename");
  bool is = !file.starts_with("<frozen");
  for (const std::string& folder : places.libraries) {
    // Below Python's own folder there may be what is installed.
    const auto installed = file.find("-packages/", folder.size());
    is &= !file.starts_with(folder) || installed != std::string::npos;
  }
  Py_INCREF(code);
  return known.emplace(code, is).first->second;
}

std::uint32_t number_of(PyFrameObject* frame, PyObject* code) {
  Places& p = places;
  const int line = PyFrame_GetLineNumber(frame);
  const std::string module = modules_around.empty() ? "" : modules_around.back();
  const auto [known, is_new] = p.numbers.try_emplace({code, line, module},
                                                     static_cast<std::uint32_t>(p.all.size()));
  if (is_new) {
    p.all.push_back({text_of(code, "co_filename"), text_of(code, "co_name"), line, module});
  }
  return known->second;
}

}  // namespace

std::uint32_t current_place() {
  if (Py_IsInitialized() == 0) return 0;
  const py::gil_scoped_acquire gil;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  std::uint32_t found = 0;
  while (frame != nullptr && found == 0) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    auto* const object = reinterpret_cast<PyObject*>(code);
    if (is_users(object)) found = number_of(frame, object);
    Py_DECREF(object);
    PyFrameObject* const back = PyFrame_GetBack(frame);
    Py_DECREF(reinterpret_cast<PyObject*>(frame));
    frame = back;
  }
  Py_XDECREF(reinterpret_cast<PyObject*>(frame));
  return found;
}

std::string describe(std::uint32_t number) {
  const py::gil_scoped_acquire gil;
  const SourcePlace& place = places.all.at(number);
  std::string text = place.file + ":" + std::to_string(place.line) + " in " + place.function;
  return place.module.empty() ? text : text + " (" + place.module + ")";
}

void bind_places(py::module_& m) {
  m.def("set_libraries", [](const std::vector<py::str>& folders) {
    places.libraries.clear();
    for (const py::str& folder : folders) places.libraries.push_back(text_of(folder));
    places.is_users.clear();
  });
  m.def("enter_module", [](const std::string& path) { modules_around.push_back(path); });
  m.def("leave_module", [] {
    if (!modules_around.empty()) modules_around.pop_back();
  });
  // (file, line, function, module path)
  m.def("place", [](std::uint32_t number) {
    const SourcePlace& place = places.all.at(number);
    return py::make_tuple(place.file, place.line, place.function, place.module);
  });
}

}  // namespace rematfn
