// SPDX-License-Identifier: Apache-2.0
//
// profiled.h: what a level does by itself, as ranges of their own in torch's profiler.

#pragma once

#include <ATen/record_function.h>

#include <string>
#include <string_view>

namespace rematfn {

// From here to its end: "rematfn::replay aten::addmm". Its name is put together only where somebody
// listens.
class Profiled {
 public:
  Profiled(std::string_view what, std::string_view of) : range_(at::RecordScope::FUNCTION) {
    if (range_.isActive()) range_.before(std::string(what) + " " + std::string(of));
  }

 private:
  at::RecordFunction range_;
};

}  // namespace rematfn
