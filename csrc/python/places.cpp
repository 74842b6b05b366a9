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

using SourcePlace = std::tuple<std::string, int, std::string, std::string>;  // file, line, function, module path

// All under the interpreter's lock.
struct Places {
  std::vector<std::string> libraries;          // folders whose frames are passed over
  std::unordered_map<PyObject*, bool> is_users;  // by code object, which is kept
  std::map<std::tuple<PyObject*, int, std::string>, std::uint32_t> numbers;
  std::vector<SourcePlace> all{{}};
};

Places& places = *new Places;  // outlives the interpreter

thread_local std::string module_around;  // or empty

// A path may have bytes that are no characters, which no other encoding takes.
std::string text_of(const py::object& text) {
  return py::cast<std::string>(text.attr("encode")("utf-8", "backslashreplace"));
}

bool is_users(const py::object& code) {
  auto& known = places.is_users;
  if (const auto found = known.find(code.ptr()); found != known.end()) return found->second;
  const std::string file = text_of(code.attr("co_filename"));
  bool is = !file.starts_with("<frozen");
  for (const std::string& folder : places.libraries) {
    // Below Python's own folder there may be what is installed.
    const auto installed = file.find("-packages/", folder.size());
    is &= !file.starts_with(folder) || installed != std::string::npos;
  }
  return known.emplace(code.inc_ref().ptr(), is).first->second;
}

}  // namespace

std::uint32_t current_place() {
  if (Py_IsInitialized() == 0) return 0;
  const py::gil_scoped_acquire gil;
  PyFrameObject* innermost = PyThreadState_GetFrame(PyThreadState_Get());
  auto frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(innermost));
  for (; frame && !frame.is_none(); frame = frame.attr("f_back")) {
    const py::object code = frame.attr("f_code");
    if (!is_users(code)) continue;
    const int line = PyFrame_GetLineNumber(reinterpret_cast<PyFrameObject*>(frame.ptr()));
    const auto [known, is_new] = places.numbers.try_emplace({code.ptr(), line, module_around},
                                                            static_cast<std::uint32_t>(places.all.size()));
    if (is_new) {
      places.all.emplace_back(text_of(code.attr("co_filename")), line, text_of(code.attr("co_name")), module_around);
    }
    return known->second;
  }
  return 0;
}

std::string describe(std::uint32_t number) {
  const py::gil_scoped_acquire gil;
  const auto& [file, line, function, module] = places.all.at(number);
  const std::string text = file + ":" + std::to_string(line) + " in " + function;
  return module.empty() ? text : text + " (" + module + ")";
}

void bind_places(py::module_& m) {
  m.def("set_libraries", [](const std::vector<py::str>& folders) {
    places.libraries.clear();
    for (const py::str& folder : folders) places.libraries.push_back(text_of(folder));
    places.is_users.clear();
  });
  m.def("set_module", [](const std::string& path) { module_around = path; });
  // (file, line, function, module path)
  m.def("place", [](std::uint32_t number) { return places.all.at(number); });
}

}  // namespace rematfn
