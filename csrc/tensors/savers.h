// SPDX-License-Identifier: Apache-2.0
//
// savers.h: what autograd may have saved, and so may read again.
//
// Note [What autograd may have saved]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A tensor that the program holds and one that a node of autograd's has saved look alike to us. But
// nodes are numbered as they are made, each before the kernel that it is for runs. So when an
// operator reads or makes a value, the node that saves it, if any does, is the latest one. A value
// notes the first and the last of these. A backward that does not keep the graph has each node that
// it executes free what it saved; once it has done so with all between the two, what still holds
// the value is the program.
//   1. Without grad mode the latest node is of an operator that is over, and saves nothing more; but
//      for a custom Function's, whose forward runs without grad mode. Its number is one that no
//      operator under grad mode has seen, and a backward, which may make a root, begins with none.
//      Where hooks pack what is saved, they run without grad mode, after the kernel of a result: what they
//      make is saved by the latest node.
//   2. Numbers are a thread's own. What another thread reads or makes may be saved for good.
//   3. Nodes that die without a backward tell nobody. What they may have saved, may be saved for good.
//   4. A backward that is recorded itself keeps its graph as a rule, and is not looked for at each operator.
// Where this errs, it takes for saved what is not.

#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include "engine/table.h"

namespace torch::autograd {
struct Node;
}

namespace rematfn {

class TensorDomain;

// Some of autograd's nodes, by the first number and the last; 0: none.
struct NodeRange {
  std::uint32_t first = 0;
  std::uint32_t last = 0;

  void add(std::uint32_t number) {
    if (number == 0) return;
    if (first == 0) first = number;
    last = std::max(last, number);
  }
};

// Autograd's nodes of the thread that made this object, numbered from then on. Under the domain's lock.
class Savers {
 public:
  Savers();

  // Numbers count from 1. 0: no node saves what the running operator reads and makes.
  // `domain`, whose member this is, learns of it when a backward has ended. `thread`: this one, as torch
  // numbers it.
  [[nodiscard]] std::uint32_t now(TensorDomain& domain, std::uint64_t thread);
  // A backward of the domain's graph runs.
  void note_backward(TensorDomain& domain);

  // Whether nobody but the program can hold what these nodes have saved.
  [[nodiscard]] bool have_freed(const NodeRange& nodes) const;
  [[nodiscard]] bool has_freed(const torch::autograd::Node& node) const;
  // Whether any backward has freed its graph.
  [[nodiscard]] bool has_any() const { return !freed_.empty(); }

 private:
  [[nodiscard]] std::uint32_t latest_node() const;
  void see_backward(TensorDomain& domain, std::uint32_t latest);
  void enter_backward(TensorDomain& domain, std::uint32_t latest);
  [[nodiscard]] std::uint32_t number_of(const torch::autograd::Node& node) const;
  void note_freed(const std::vector<std::uint32_t>& numbers);

  const std::uint64_t base_;
  const std::uint64_t thread_;
  std::uint32_t seen_ = 0;  // the latest under grad mode
  int backward_ = -1;       // that the last operator ran in
  std::set<int> noted_;     // backwards that have not ended
  std::vector<bool> freed_;  // by number
};

}  // namespace rematfn
