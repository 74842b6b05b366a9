// SPDX-License-Identifier: Apache-2.0
//
// shortening.cpp: the part of Sequence that leaves replays out.
#include "planning/shortening.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "planning/sequence.h"

namespace rematfn {

void Sequence::shorten() {
  constexpr double kFiner = 4;
  const auto calls = static_cast<double>(trace_.calls.size());
  const double all = trace_.cost() / static_cast<double>(budget_);  // saved by one call at that price
  for (double price = all; price * calls * calls > all; price /= kFiner) sweep(price);
  for (int i = 0; i < 4 && sweep(0); ++i) {
  }
}

bool Sequence::sweep(double price) {
  constexpr double kHopeless = 4;  // more replays may be spared by it further on
  const std::size_t count = items_.size();
  std::vector<std::uint64_t> before(count + 1);  // what is live there, by its name
  std::vector<std::size_t> during(count);        // bytes; zero: it is left out, or useless
  std::vector<bool> left_out(count, false);
  begin();
  for (std::size_t i = count; i-- > 0;) {
    before[i + 1] = state_;
    during[i] = step_over(items_[i]);
  }
  before[0] = state_;
  begin();
  bool found = false;
  std::uint64_t looked_at = 0;
  for (std::size_t i = count; i-- > 0;) {
    if (left_out[i]) continue;
    if (items_[i].is_replay && during[i] > 0) {
      double saved = nodes_[items_[i].node].cost;
      double taken = 0;  // bytes times calls
      logs_ = is_valid_ = true;
      bool fits = true;
      std::size_t k = i;
      for (; fits && state_ != before[k]; ) {
        fits = k > 0;
        if (!fits || left_out[--k]) continue;
        ++looked_at;
        const std::size_t needed = step_over(items_[k]);
        const double cost = items_[k].is_replay ? nodes_[items_[k].node].cost : 0;
        if (needed == 0) {
          if (during[k] > 0) saved += cost;
        } else {
          if (during[k] == 0) saved -= cost;
          if (needed > during[k] && during[k] > 0) taken += static_cast<double>(needed - during[k]);
          fits = is_valid_ && needed <= std::max(budget_, during[k]) && price * taken < kHopeless * saved;
        }
      }
      undo();
      is_valid_ = true;
      if (fits && saved > 0 && saved >= price * taken) {
        found = left_out[i] = true;
        logs_ = true;
        before[i] = state_;
        for (std::size_t j = i; j-- > k;) {
          if (!left_out[j]) during[j] = step_over(items_[j]);
          before[j] = state_;
        }
        undo();
        continue;
      }
    }
    step_over(items_[i]);
  }
  note_steps(looked_at + 2 * count);
  std::vector<Item> rest;
  for (std::size_t i = 0; i < count; ++i) {
    if (!left_out[i]) rest.push_back(items_[i]);
  }
  items_ = std::move(rest);
  drop_useless();
  return found;
}

std::shared_ptr<const Schedule> shortened(const Trace& trace, std::size_t budget,
                                          const std::vector<Replayed>& replays, Effort& effort,
                                          const ExchangeLimits& exchanges) {
  Exchanges sequence(trace, budget, replays, effort);
  sequence.shorten();
  if (exchanges.operators > 0) sequence.exchange(exchanges);
  return sequence.schedule();
}

}  // namespace rematfn
