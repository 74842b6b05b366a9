// SPDX-License-Identifier: Apache-2.0
//
// tier.h: where the bytes of tensors can lie meanwhile: a disk for those on a CPU, or packed where they are;
// the host's memory for those on an accelerator.

#pragma once

#include <c10/core/Storage.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "engine/link.h"
#include "memory/tier_account.h"
#include "tensors/shared_bytes.h"

namespace rematfn {

class TensorDomain;

class Tier {
 public:
  // Seconds waited for copies. They may be found out later, on another thread.
  struct Waits {
    void add(double more, bool returning) {
      seconds += more;
      late_returns += returning;
    }

    std::atomic<double> seconds{0};
    std::atomic<std::uint64_t> late_returns{0};
  };

  // The bytes of one value. To destroy it is to discard it: nothing uses the value's memory any more, but
  // what the allocator of that memory has been told of.
  class Copy {
   public:
    Copy(std::size_t bytes, c10::Device of, std::shared_ptr<Waits> waits)
        : nbytes(bytes), device(of), waits_(std::move(waits)) {}
    Copy(const Copy&) = delete;
    Copy& operator=(const Copy&) = delete;
    virtual ~Copy() = default;

    // Whether nothing is under way, as far as can be told.
    [[nodiscard]] virtual bool is_done() const = 0;
    // Whatever is computed from now on comes after what was begun. What that is waited is noted. Throws
    // CopyLost.
    virtual void wait(bool returning) = 0;
    // Starts to bring the bytes back; the copy stays whole. Only what has been waited for can be brought
    // back; where a return failed it may be tried again. Throws CopyLost.
    virtual void get(c10::Storage to) = 0;
    // What has come back: wait() first.
    [[nodiscard]] virtual c10::Storage take() { return std::move(comes_to_); }
    // What comes back is not wanted now.
    virtual void turn_back() = 0;
    // Bytes that it takes up in the memory that the value was in, whose place it has taken; 0: none. Then it is
    // done at once, and get() has brought the bytes when it returns.
    [[nodiscard]] virtual std::size_t bytes_here() const { return 0; }
    // Of such a copy: some of the bytes that it is of. Several threads may read at once.
    virtual void read(std::size_t /*begin*/, std::size_t /*count*/, char* /*to*/) const {
      throw std::logic_error("only what lies in memory is read in parts");
    }

    const std::size_t nbytes;
    const c10::Device device;
    std::optional<std::uint64_t> sum;  // of the bytes, as they were, if what comes back is compared as a whole
    SharedBytes leaves;  // until it has left; they live longer than what reads them

   protected:
    const std::shared_ptr<Waits> waits_;
    c10::Storage comes_to_;
  };

  // `unmeasured`: what is taken for its speed until some bytes have moved.
  Tier(const char* given_name, bool is_for_accelerators, const LinkFigures& unmeasured)
      : name(given_name), for_accelerators(is_for_accelerators), unmeasured_(unmeasured) {}
  Tier(const Tier&) = delete;
  Tier& operator=(const Tier&) = delete;
  virtual ~Tier() = default;

  // Whether put() may be asked, now.
  [[nodiscard]] virtual bool has_room(const c10::Storage& bytes) const {
    return account().has_room(bytes.nbytes());
  }
  // Whether take_over() may be.
  [[nodiscard]] virtual bool has_room_for_copy(std::size_t /*nbytes*/) const { return false; }
  // Of these bytes, the share that a copy takes up here; 1: it cannot be packed.
  [[nodiscard]] virtual double packed_share(const c10::Storage&) const { return 1; }
  // Starts to copy them out, after what has been computed. They must stay as they are until the copy is
  // done or gone. Null if there is no room after all, which has_room() tells from then on.
  [[nodiscard]] virtual std::unique_ptr<Copy> put(const c10::Storage& bytes, TensorDomain& domain,
                                                  std::shared_ptr<Waits> waits) = 0;
  // What `copy` holds, which takes up memory, is copied when this returns. Null if there is no room.
  [[nodiscard]] virtual std::unique_ptr<Copy> take_over(const Copy& /*copy*/, std::shared_ptr<Waits> /*waits*/) {
    return nullptr;
  }
  // As measured of late. If only one bandwidth is known, they are taken to be the same.
  [[nodiscard]] LinkFigures link() const {
    LinkFigures found = unmeasured_;
    const double out = account().out.bandwidth;
    const double in = account().in.bandwidth;
    if (out > 0 || in > 0) {
      found.per_byte_out = 1 / (out > 0 ? out : in);
      found.per_byte_in = 1 / (in > 0 ? in : out);
    }
    return found;
  }
  // A call begins: what was full may have room again.
  virtual void try_again() {}
  // Measures if nothing is known yet: what moving takes is to be compared with replays before anything
  // has moved. Where all moves, transfers tell soon enough.
  virtual void find_bandwidth() {}
  // Bytes that are on their way back, or to be. Cheap.
  [[nodiscard]] std::size_t queued_in() const { return account().in.queued; }
  [[nodiscard]] virtual TierFigures figures() = 0;

  const char* const name;  // as messages say it: "on the disk"
  const bool for_accelerators;

 protected:
  [[nodiscard]] virtual const TierAccount& account() const = 0;

 private:
  const LinkFigures unmeasured_;
};

}  // namespace rematfn
