// SPDX-License-Identifier: Apache-2.0
//
// keeping.h: what a policy names by what it is: kept as long as anything else can go.
//
// A score weighs what a value costs against what it frees. Some users know better: which values to
// keep, by the operator that made them or by the name that the program gave them. Such a value
// scores above every other, so that it goes last; the budget holds all the same. What the program marks
// is kept under every policy; names narrow it.

#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "policy/work.h"

namespace rematfn {

struct Keeping {
  enum class Marks : std::uint8_t {
    kHeeded,  // every value that the program has marked; of others the policy says nothing
    kAll,     // every value that the program has marked, and of the forward no other
    kOnly,    // those marked with one of `names`
    kBut,     // those marked otherwise
    kAllBut,  // all values whatever but those marked with one of `names`
  };

  bool products = false;  // results of matrix products, convolutions and attention
  Marks marks = Marks::kHeeded;
  std::vector<std::string> names;

  // Whether it chooses among what the forward leaves behind, marked or not.
  [[nodiscard]] bool decides() const { return products || marks != Marks::kHeeded; }
  // Whether a value is kept that no mark is on (yet), made by an operator that does such work. The
  // choice is among what the forward leaves behind; values of the backward do not go before that.
  [[nodiscard]] bool unmarked(Work work, bool backward) const {
    return (products && is_product(work)) || marks == Marks::kAllBut || (backward && decides());
  }
  // Whether what an operator writes over a value is kept, if the value was.
  [[nodiscard]] bool written() const { return products; }
  // Whether a value marked with `name` is; an empty one is none.
  [[nodiscard]] bool marked(std::string_view name) const {
    const bool named = std::find(names.begin(), names.end(), name) != names.end();
    return marks == Marks::kHeeded || marks == Marks::kAll || named == (marks == Marks::kOnly);
  }
};

}  // namespace rematfn
