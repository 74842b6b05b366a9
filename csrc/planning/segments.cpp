// SPDX-License-Identifier: Apache-2.0
#include "planning/segments.h"

#include <algorithm>
#include <numeric>

namespace rematfn {

Segments::Segments(const Trace& trace)
    : trace_(trace), made_(trace.values.size(), kNobody), last_read_(trace.values.size(), kNobody) {
  find_forward();
  find_crossings();
  find_cut_points();
}

// The turn to the backward is where the most bytes wait to be read.
void Segments::find_forward() {
  for (std::size_t i = 0; i < trace_.calls.size(); ++i) {
    for (const Trace::Read& read : trace_.calls[i].reads) last_read_[read.value] = i;
    for (const Trace::Made& made : trace_.calls[i].makes) made_[made.value] = i;
  }
  const std::vector<std::size_t> waiting = bytes_between(trace_.calls.size() + 1);
  const auto most = std::max_element(waiting.begin(), waiting.end());
  if (*most > 0) forward_ = static_cast<std::size_t>(most - waiting.begin());
}

// Before each of `count` calls, the bytes of what was made already and is still to be read.
std::vector<std::size_t> Segments::bytes_between(std::size_t count) const {
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
void Segments::find_crossings() {
  std::fill(last_read_.begin(), last_read_.end(), kNobody);
  made_bytes_.assign(1, 0);
  for (std::size_t i = 0; i < forward_; ++i) {
    for (const Trace::Read& read : trace_.calls[i].reads) last_read_[read.value] = i;
    made_bytes_.push_back(made_bytes_.back() + trace_.calls[i].output_bytes);
  }
  crossing_ = bytes_between(forward_ + 1);
}

// In program order an articulation point is a value that is alone in crossing the place after it.
void Segments::find_cut_points() {
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

std::vector<bool> Segments::across(std::size_t count) const {
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

std::vector<bool> Segments::at_cut_points(std::size_t stride) const {
  std::vector<bool> found(trace_.values.size(), false);
  for (Trace::Id v = 0; v < trace_.values.size(); ++v) {
    found[v] = made_[v] != kNobody && made_[v] >= forward_;
  }
  for (std::size_t i = stride - 1; i < cut_points_.size(); i += stride) found[cut_points_[i]] = true;
  return found;
}

}  // namespace rematfn
