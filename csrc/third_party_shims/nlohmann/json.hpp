// SPDX-License-Identifier: Apache-2.0
//
// A stand-in for a header that torch's wheel includes but does not ship.
//
// ATen/functorch/Interpreter.h includes <nlohmann/json.hpp> so that an interpreter can be serialised,
// and every other functorch header includes Interpreter.h. We read functorch's wrappers and never
// serialise an interpreter, so the names that Interpreter.h spells out are all that has to exist: they
// are declared, and defined nowhere. To use one is then an error when the extension is linked (the
// class is hidden, so the linker may not leave its members for later), rather than wrong JSON.
//
// The real class is a template in a versioned inner namespace; this one is a plain class, so the two
// have different symbols and can be loaded into one process.

#pragma once

#include <string>

namespace nlohmann {

class __attribute__((visibility("hidden"))) json {
 public:
  json();
  template <typename T>
  explicit json(const T& value);

  static json parse(const std::string& text);
  [[nodiscard]] std::string dump() const;

  template <typename T>
  [[nodiscard]] T get() const;
};

}  // namespace nlohmann
