// SPDX-License-Identifier: Apache-2.0
//
// segments.h: the forward part of a trace, cut into segments: which values a cut keeps.
//
// Chen et al. (2016) cut a chain into segments, keep what crosses from one to the next, and compute
// the rest again, one segment at a time. A trace is a chain once it is taken as the sequence that it
// is: every place between two calls is crossed by the values made before and read after it.

#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

#include "engine/trace.h"

namespace rematfn {

class Segments {
 public:
  explicit Segments(const Trace& trace)
      : trace_(trace), made_(trace.values.size(), kNobody), last_read_(trace.values.size(), kNobody) {
    find_forward();
    find_crossings();
    find_cut_points();
  }

  // What is made after the turn is in the answers too: the choice is among what the forward leaves.
  // By value, whether it crosses a boundary between `count` segments that make about as many bytes
  // each. A boundary lies where little crosses, near its place.
  [[nodiscard]] std::vector<bool> across(std::size_t count) const {
    const double share = static_cast<double>(made_bytes_.back()) / static_cast<double>(count);
    const auto place_of = [&](double bytes) {
      const auto found = std::lower_bound(made_bytes_.begin(), made_bytes_.end(),
                                          static_cast<std::size_t>(bytes));
      return std::min(static_cast<std::size_t>(found - made_bytes_.begin()), forward_);
    };
    std::vector<std::size_t> boundaries;
    for (std::size_t k = 1; k < count; ++k) {
      const double nominal = share * static_cast<double>(k);
      std::size_t best = place_of(nominal);
      for (std::size_t i = place_of(nominal - share / 4); i <= place_of(nominal + share / 4); ++i) {
        if (crossing_[i] < crossing_[best]) best = i;
      }
      boundaries.push_back(best);
    }
    std::vector<bool> found(trace_.values.size(), false);
    for (Trace::Id v = 0; v < trace_.values.size(); ++v) {
      if (made_[v] == kNobody) continue;
      found[v] = made_[v] >= forward_;
      if (last_read_[v] == kNobody) continue;
      const auto next = std::upper_bound(boundaries.begin(), boundaries.end(), made_[v]);
      found[v] = found[v] || (next != boundaries.end() && *next <= last_read_[v]);
    }
    return found;
  }

  // By value, whether it is one of every `stride`-th cut point. A cut point is a value through which
  // all paths go from what is computed before it to what is computed after: an articulation point
  // of the graph. Values that depend on no argument, and small ones, may go around it.
  [[nodiscard]] std::vector<bool> at_cut_points(std::size_t stride) const {
    std::vector<bool> found(trace_.values.size(), false);
    for (Trace::Id v = 0; v < trace_.values.size(); ++v) {
      found[v] = made_[v] != kNobody && made_[v] >= forward_;
    }
    for (std::size_t i = stride - 1; i < cut_points_.size(); i += stride) found[cut_points_[i]] = true;
    return found;
  }
  [[nodiscard]] std::size_t cut_points() const { return cut_points_.size(); }
  // The most segments there can be.
  [[nodiscard]] std::size_t calls() const { return forward_; }

 private:
  static constexpr std::size_t kNobody = static_cast<std::size_t>(-1);

  // The turn to the backward is where the most bytes wait to be read.
  void find_forward() {
    for (std::size_t i = 0; i < trace_.calls.size(); ++i) {
      for (const Trace::Read& read : trace_.calls[i].reads) last_read_[read.value] = i;
      for (const Trace::Made& made : trace_.calls[i].makes) made_[made.value] = i;
    }
    const std::vector<std::size_t> waiting = bytes_between(trace_.calls.size() + 1);
    const auto most = std::max_element(waiting.begin(), waiting.end());
    if (*most > 0) forward_ = static_cast<std::size_t>(most - waiting.begin());
  }

  // Before each of `count` calls, the bytes of what was made already and is still to be read.
  [[nodiscard]] std::vector<std::size_t> bytes_between(std::size_t count) const {
    std::vector<std::size_t> bytes(count + 1, 0);
    for (Trace::Id v = 0; v < trace_.values.size(); ++v) {
      if (made_[v] == kNobody || last_read_[v] == kNobody) continue;
      bytes[made_[v] + 1] += trace_.values[v].nbytes;
      bytes[last_read_[v] + 1] -= trace_.values[v].nbytes;  // the sums are never negative
    }
    std::partial_sum(bytes.begin(), bytes.end(), bytes.begin());
    bytes.pop_back();
    return bytes;
  }

  // From here on only the reads of the forward count: the backward reads across every boundary.
  void find_crossings() {
    std::fill(last_read_.begin(), last_read_.end(), kNobody);
    made_bytes_.assign(1, 0);
    for (std::size_t i = 0; i < forward_; ++i) {
      for (const Trace::Read& read : trace_.calls[i].reads) last_read_[read.value] = i;
      made_bytes_.push_back(made_bytes_.back() + trace_.calls[i].output_bytes);
    }
    crossing_ = bytes_between(forward_ + 1);
  }

  // In program order an articulation point is a value that is alone in crossing the place after it.
  void find_cut_points() {
    std::vector<bool> from_arguments(trace_.values.size(), false);
    std::size_t bytes = 0;
    std::size_t values = 0;
    for (std::size_t i = 0; i < forward_; ++i) {
      const auto& reads = trace_.calls[i].reads;
      const bool depends = std::any_of(reads.begin(), reads.end(), [&](const Trace::Read& read) {
        return made_[read.value] == kNobody || from_arguments[read.value];
      });
      for (const Trace::Made& made : trace_.calls[i].makes) {
        from_arguments[made.value] = depends;
        bytes += trace_.values[made.value].nbytes;
        ++values;
      }
    }
    if (values == 0) return;
    const std::size_t small = bytes / values / 100;
    std::vector<std::int64_t> count(forward_ + 2, 0);
    std::vector<std::int64_t> sum_of_names(forward_ + 2, 0);
    for (Trace::Id v = 0; v < trace_.values.size(); ++v) {
      if (made_[v] == kNobody || last_read_[v] == kNobody) continue;
      if (!from_arguments[v] || trace_.values[v].nbytes <= small) continue;
      ++count[made_[v] + 1];
      --count[last_read_[v] + 1];
      sum_of_names[made_[v] + 1] += v;
      sum_of_names[last_read_[v] + 1] -= v;
    }
    for (std::size_t i = 1; i <= forward_; ++i) {
      count[i] += count[i - 1];
      sum_of_names[i] += sum_of_names[i - 1];
      if (count[i] != 1) continue;
      const auto alone = static_cast<Trace::Id>(sum_of_names[i]);
      if (cut_points_.empty() || cut_points_.back() != alone) cut_points_.push_back(alone);
    }
  }

  const Trace& trace_;
  std::size_t forward_ = 0;             // calls up to the turn to the backward
  std::vector<std::size_t> made_;       // by value: the call that makes it, or kNobody
  std::vector<std::size_t> last_read_;  // by value: the last call that reads it, or kNobody
  std::vector<std::size_t> made_bytes_;  // before each call of the forward
  std::vector<std::size_t> crossing_;   // bytes that cross into each call of the forward
  std::vector<Trace::Id> cut_points_;   // in program order
};

}  // namespace rematfn
