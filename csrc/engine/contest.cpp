// SPDX-License-Identifier: Apache-2.0
#include "engine/contest.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace rematfn {

Contest::Contest(const std::vector<Followed>& plans, std::size_t racing, std::size_t substitutes)
    : next_substitute_(racing), end_of_substitutes_(racing + substitutes) {
  for (const Followed& plan : plans) {
    entrants_.push_back({.followed = plan, .takes_part = entrants_.size() < racing});
  }
}

bool Contest::goes_on() const { return std::ranges::count_if(entrants_, &Entrant::takes_part) > 1; }

bool Contest::is_decided() const {
  const std::lock_guard guard(feedback_mutex());
  return !goes_on();
}

Followed Contest::next() const {
  const std::lock_guard guard(feedback_mutex());
  const Entrant* next = nullptr;
  for (const Entrant& entrant : entrants_) {
    if (!entrant.takes_part) continue;
    if (next == nullptr || entrant.seconds.size() < next->seconds.size()) next = &entrant;
  }
  return next != nullptr ? next->followed : entrants_.front().followed;
}

void Contest::note(const Plan& plan, double seconds) {
  const std::lock_guard guard(feedback_mutex());
  if (!goes_on()) return;
  for (Entrant& entrant : entrants_) {
    if (entrant.followed.plan.get() != &plan || !entrant.takes_part) continue;
    entrant.seconds.push_back(seconds);
    entrant.takes_part = seconds != kNever;
  }
  if (rounds() >= kUncounted + kLeast) exclude_slower();
}

void Contest::note_broken(const Plan& plan) {
  const std::lock_guard guard(feedback_mutex());
  const auto found = std::ranges::find(entrants_, &plan, [](const Entrant& entrant) {
    return entrant.followed.plan.get();
  });
  if (found == entrants_.end() || found->broken) return;
  found->broken = true;
  found->takes_part = false;
  if (next_substitute_ < end_of_substitutes_) return enter(entrants_[next_substitute_++]);
  if (std::ranges::any_of(entrants_, &Entrant::takes_part)) return;
  const auto next = std::ranges::find(entrants_, false, &Entrant::broken);
  if (next != entrants_.end()) enter(*next);
}

// Rounds are compared, and it has had none.
void Contest::enter(Entrant& entrant) {
  entrant.takes_part = true;
  for (Entrant& each : entrants_) each.seconds.clear();
}

std::size_t Contest::rounds() const {
  std::size_t least = kRounds;
  for (const Entrant& entrant : entrants_) {
    if (entrant.takes_part) least = std::min(least, entrant.seconds.size());
  }
  return least;
}

double Contest::relative(const Entrant& entrant) const {
  std::vector<double> found;
  for (std::size_t round = kUncounted; round < rounds(); ++round) {
    double fastest = kNever;
    for (const Entrant& other : entrants_) {
      if (other.takes_part) fastest = std::min(fastest, other.seconds[round]);
    }
    found.push_back(entrant.seconds[round] / fastest);
  }
  return median(std::move(found));
}

void Contest::exclude_slower() {
  std::vector<double> found;
  for (const Entrant& entrant : entrants_) {
    found.push_back(entrant.takes_part ? relative(entrant) : kNever);
  }
  const auto best = std::ranges::min_element(found);
  const bool is_over = rounds() == kRounds;
  const double most = 1 + kChance / std::sqrt(static_cast<double>(rounds() - kUncounted));
  for (std::size_t i = 0; i < entrants_.size(); ++i) {
    const bool is_slower = is_over ? &found[i] != &*best : found[i] > most * *best;
    if (is_slower) entrants_[i].takes_part = false;
  }
}

}  // namespace rematfn
