// SPDX-License-Identifier: Apache-2.0
#include "engine/feedback.h"

#include <pthread.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace rematfn {

std::mutex& feedback_mutex() {
  static auto* const mutex = new std::mutex;  // calls may end while the process does
  return *mutex;
}

namespace {

// When the library is loaded, and so before all others of ours: a fork takes it after them.
const int feedback_at_fork = pthread_atfork([] { feedback_mutex().lock(); }, [] { feedback_mutex().unlock(); },
                                            [] { feedback_mutex().unlock(); });

// At least one; of an even number the lower of two: what disturbs a call makes it longer.
double median(std::vector<double> seconds) {
  const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>((seconds.size() - 1) / 2);
  std::ranges::nth_element(seconds, middle);
  return *middle;
}

double sum(const std::vector<double>& seconds) {
  return std::accumulate(seconds.begin(), seconds.end(), 0.0);
}

// Operator by operator; together they come to what a call takes. They are lengthened for that: what
// disturbs one call here and another there is in the middle nowhere, and in the time of each.
std::vector<double> medians(const std::vector<Times>& calls, std::vector<double> Times::* what) {
  std::vector<double> found(calls.size());
  const auto median_of = [&](const auto& of_a_call) {
    std::ranges::transform(calls, found.begin(), of_a_call);
    return median(found);
  };
  const double total = median_of([&](const Times& call) { return sum(call.*what); });
  std::vector<double> all;
  for (std::size_t i = 0; i < (calls.front().*what).size(); ++i) {
    all.push_back(median_of([&](const Times& call) { return (call.*what)[i]; }));
  }
  const double apart = sum(all);
  if (apart > 0) {
    for (double& each : all) each *= total / apart;
  }
  return all;
}

}  // namespace

void Timings::add(Times times) {
  constexpr double kAlike = 1.25;
  const double taken = sum(times.costs) + sum(times.pauses);
  const double alone = std::max(taken - drag_ * times.copying, taken / (1 + drag_));
  if (taken > 0) {
    for (double& each : times.costs) each *= alone / taken;
    for (double& each : times.pauses) each *= alone / taken;
  }
  const double total = sum(times.costs);
  const std::lock_guard guard(feedback_mutex());
  if (calls_.size() == kEnough) return;
  std::erase_if(calls_, [&](const Times& call) { return sum(call.costs) > kAlike * total; });
  for (const Times& call : calls_) {
    if (total > kAlike * sum(call.costs)) return;
  }
  calls_.push_back(std::move(times));
}

std::shared_ptr<const Trace> Timings::applied_to(const Trace& trace) const {
  std::vector<Times> calls;
  {
    const std::lock_guard guard(feedback_mutex());
    if (calls_.size() < kEnough) return nullptr;
    calls = calls_;
  }
  const std::vector<double> costs = medians(calls, &Times::costs);
  const std::vector<double> pauses = medians(calls, &Times::pauses);
  auto timed = std::make_shared<Trace>(trace);
  for (std::size_t i = 0; i < costs.size(); ++i) {
    timed->calls[i].cost = costs[i];
    timed->calls[i].pause = clocked_ ? pauses[i] : 0;
  }
  return timed;
}

}  // namespace rematfn
