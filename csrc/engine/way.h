// SPDX-License-Identifier: Apache-2.0
//
// way.h: how a version goes, and how it comes back.
//
// Note [A version goes by a way]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A level lets its versions go by one way or several: it drops them, to have them replayed, or it
// keeps a copy of them elsewhere. For each version the way is taken that is the cheapest to come back
// by, among those of its level and of the levels around it. What the engine takes into account:
//   1. A copy ends a replay's closure: what has one need not be replayed.
//   2. Bytes that are being copied count until they are gone. Whoever needs room lets as much go as
//      it takes, and then waits. Who needs the version meanwhile calls it back: it still has its
//      bytes. Bytes that come count from when room is made for them. What comes before it is asked
//      for gives its room back when nothing else can go.
//   3. A write waits: what it overwrites has been called back, which takes until nothing reads the
//      bytes any more.
//   4. To come back by a copy takes no producer. So what cannot be replayed may go by one: a snapshot,
//      a constant, the result of an operator that is never replayed. What somebody outside may read or
//      write in place stays: uninitialised memory, what an address was given out of to keep. So does what
//      somebody has taken the storage of by the time that its copy is made.
//   5. What has come back, or is asked for no more, has no copy: there is one of each version.
//   6. A copy takes time that operators can hide. So what will not be read for long may go before its
//      room is wanted, and come before it is asked for: when, a guide knows, and the way says what
//      pays. A level that is to hold nothing but what is in use lets all go that two operators have not
//      touched. What is touched every few operators, such as a gradient that others are added to, goes
//      and comes back each time, if no guide knows better. So where more than a quarter of the time of
//      operators has been waited for copies, a value has to have lain for as long as they take, first.
//   7. What will never be read again, as far as a guide knows, is dropped, whatever the ways: nobody
//      waits for it, and if the guide is wrong it is replayed. But not while replays are to read it:
//      those of a tight call would have it made again for each other without end. And before its room
//      is wanted only if nothing may be missed that is dropped and replayed from it later.

#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "policy/eviction.h"

namespace rematfn {

struct Version;

// Where the bytes of a version are.
enum class Place : std::uint8_t {
  kHere,
  kLeaving,  // here, and on their way to a copy
  kAway,
  kComing,   // there is room for them here, which a copy is on its way to
};

// A copy cannot be had back. It is still to be discarded.
struct CopyLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Way {
 public:
  Way() = default;
  Way(const Way&) = delete;
  Way& operator=(const Way&) = delete;
  virtual ~Way() = default;

  // Whether what has gone by it is elsewhere, and comes back without its producer.
  [[nodiscard]] virtual bool keeps_copy() const = 0;
  // Whether `version` may ever go by it, as far as its nature tells.
  [[nodiscard]] virtual bool applies(const Version& version) const = 0;
  // And now.
  [[nodiscard]] virtual bool has_room(const Version&) const { return true; }
  // Of the bytes of `version`, the share that its copy would take up here: an estimate. Version::packed_share has it
  // from when it is admitted, and the exact one once it has been packed.
  [[nodiscard]] virtual double packed_share(const Version&) const { return 1; }
  // Bytes that its copy takes up here. See Note [A copy may stay in memory].
  [[nodiscard]] virtual std::size_t bytes_here(const Version&) const { return 0; }
  // Whether it takes over a copy of `version` that takes up memory here, now; and to do so: false if the copy
  // had to stay where it is.
  [[nodiscard]] virtual bool takes_copies(const Version&) const { return false; }
  [[nodiscard]] virtual bool take_copy(Version&, Way& /*from*/) { has_no_copies(); }
  // To have it back, in seconds of the cost model; without what would have to be replayed for it.
  [[nodiscard]] virtual double cost(const Version& version) const = 0;
  // `version` goes. Returns where it is then: away, leaving, or here, if there was no room after all.
  [[nodiscard]] virtual Place leave(Version& version) = 0;

  // Of ways that keep a copy. Room for the bytes has been made: they come, and the copy goes when they
  // are there. Returns where the version is then: here, or coming. Throws CopyLost.
  [[nodiscard]] virtual Place bring_back(Version&) { has_no_copies(); }
  // Whether a version that is under way has arrived.
  [[nodiscard]] virtual bool has_arrived(const Version&) const { return true; }
  // Waits until it has. Returns where it is: what was leaving is away, or here if it has to stay after
  // all, and has no copy then; what was coming is here. Throws CopyLost.
  [[nodiscard]] virtual Place wait(Version&) { has_no_copies(); }
  // Whether what is away is to be on its way by now, if it is read `until` later, in program time.
  [[nodiscard]] virtual bool is_due(const Version&, double /*until*/) const { return false; }
  // To let `version` go before its room is wanted pays if it is not read for longer than this.
  [[nodiscard]] virtual double pays_after(const Version&) const { return kNever; }
  // What is coming goes back: it is away, and has its copy.
  virtual void turn_back(Version&) { has_no_copies(); }
  // The copy, whole or not, is not asked for any more. Nothing reads the bytes when this returns.
  virtual void discard(Version&) { has_no_copies(); }

 private:
  [[noreturn]] static void has_no_copies() {
    throw std::logic_error("rematfn: nothing has a copy that went by a way that keeps none");
  }
};

}  // namespace rematfn
