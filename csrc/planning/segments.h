// SPDX-License-Identifier: Apache-2.0
//
// segments.h: the forward part of a trace, cut into segments: which values a cut keeps.
//
// Chen et al. (2016) cut a chain into segments, keep what crosses from one to the next, and compute
// the rest again, one segment at a time. A trace is a chain once it is taken as the sequence that it
// is: every place between two calls is crossed by the values made before and read after it.

#pragma once

#include <cstddef>
#include <vector>

#include "engine/trace.h"

namespace rematfn {

class Segments {
 public:
  explicit Segments(const Trace& trace);

  // What is made after the turn is in the answers too: the choice is among what the forward leaves.
  // By value, whether it crosses a boundary between `count` segments that make about as many bytes
  // each. A boundary lies where little crosses, near its place.
  [[nodiscard]] std::vector<bool> across(std::size_t count) const;
  // By value, whether it is one of every `stride`-th cut point. A cut point is a value through which
  // all paths go from what is computed before it to what is computed after: an articulation point
  // of the graph. Values that depend on no argument, and small ones, may go around it.
  [[nodiscard]] std::vector<bool> at_cut_points(std::size_t stride) const;
  [[nodiscard]] std::size_t cut_points() const { return cut_points_.size(); }
  // The most segments there can be.
  [[nodiscard]] std::size_t calls() const { return forward_; }

 private:
  static constexpr std::size_t kNobody = static_cast<std::size_t>(-1);

  void find_forward();
  void find_crossings();
  void find_cut_points();
  [[nodiscard]] std::vector<std::size_t> bytes_between(std::size_t count) const;

  const Trace& trace_;
  std::size_t forward_ = 0;             // calls up to the turn to the backward
  std::vector<std::size_t> made_;       // by value: the call that makes it, or kNobody
  std::vector<std::size_t> last_read_;  // by value: the last call that reads it, or kNobody
  std::vector<std::size_t> made_bytes_;  // before each call of the forward
  std::vector<std::size_t> crossing_;   // bytes that cross into each call of the forward
  std::vector<Trace::Id> cut_points_;   // in program order
};

}  // namespace rematfn
