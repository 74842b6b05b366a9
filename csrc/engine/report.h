// SPDX-License-Identifier: Apache-2.0
//
// report.h: what a call did, in numbers.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include <c10/util/intrusive_ptr.h>

#include "engine/unrecorded.h"

namespace rematfn {

class Domain;
class DomainLock;
class Journal;
struct Trace;

// What a call of a transformed function did. Read by `stats`.
struct Statistics {
  std::size_t peak_bytes = 0;
  std::size_t unconstrained_bytes = 0;  // See Note [What a call would have held]
  std::size_t min_budget = 0;
  std::uint64_t operators = 0;
  std::uint64_t evictions = 0;
  std::uint64_t replays = 0;
  double base_cost = 0;
  double replayed_cost = 0;
  double base_flops = 0;
  double replayed_flops = 0;
  // By ways that keep a copy.
  std::uint64_t moves = 0;
  std::uint64_t returns = 0;
  std::uint64_t turned_back = 0;    // that came too early: the room was wanted
  std::size_t moved_bytes = 0;
  std::size_t returned_bytes = 0;
  // Of the outermost level: returns that were waited for, and seconds of waiting for transfers.
  std::uint64_t late_returns = 0;
  double waited = 0;

  // What it costs beyond the program's own operators.
  [[nodiscard]] double overhead() const { return replayed_cost + waited; }
};

// A number of bytes that changes under the domain's lock, and is read by anybody.
class ByteCount {
 public:
  operator std::size_t() const { return nbytes_.load(std::memory_order_relaxed); }
  void operator+=(std::size_t n) { nbytes_.store(*this + n, std::memory_order_relaxed); }
  void operator-=(std::size_t n) { nbytes_.store(*this - n, std::memory_order_relaxed); }
  void operator=(std::size_t n) { nbytes_.store(n, std::memory_order_relaxed); }

 private:
  std::atomic<std::size_t> nbytes_{0};
};

// Note [Nothing of a call outlives it but numbers]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Whoever asks what a call did may ask long after it, and after its backward, whose figures are the
// call's too. A level that was kept for that would keep the forms of its operators, with whatever was
// among their arguments. So a level writes its figures where they can be read without it.
struct Report {
  Statistics statistics;
  ByteCount budget;
  ByteCount resident_bytes;
  ByteCount unconstrained_bytes;  // as in the statistics
  bool guide_lost = false;  // at some time
  std::string lost_at;      // the operator at which it last was, or changed its plan
  std::string neediest;  // the operator that needs most at once: it sets the least budget
  bool stopped = false;  // for what its replays cost
  c10::intrusive_ptr<UnrecordedBytes> unrecorded;
  std::shared_ptr<Trace> trace;  // if the level records
  std::shared_ptr<Journal> journal;  // if somebody asked for one
  std::weak_ptr<Domain> domain;

  // The domain's lock, for who reads while the call may run on another thread; null if there is none to take.
  [[nodiscard]] std::unique_ptr<DomainLock> lock() const;
  // By anybody, while the call runs as well.
  [[nodiscard]] Statistics read() const;
  // Resident, or beside operators. See Note [Bytes beside operators].
  [[nodiscard]] std::size_t bytes_now() const {
    return resident_bytes + (unrecorded ? unrecorded->live() : 0);
  }
  // What was recorded; recording ends. Null if the level did not record, or was asked before. `waits`: for
  // another thread that is in the domain; else it is null then, and the record goes on.
  [[nodiscard]] std::shared_ptr<Trace> take_trace(bool waits = true);
};

}  // namespace rematfn
