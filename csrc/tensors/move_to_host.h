// SPDX-License-Identifier: Apache-2.0
//
// move_to_host.h: versions on an accelerator go to the host's memory, and come back from it.

#pragma once

#include <memory>
#include <unordered_map>

#include "engine/link.h"
#include "planning/simulation.h"
#include "tensors/host.h"
#include "tensors/shared_bytes.h"

namespace rematfn {

class TensorDomain;

// Of one domain. Several may move to one host.
class MoveToHost final : public Link {
 public:
  MoveToHost(TensorDomain& domain, std::shared_ptr<Host> host);

  [[nodiscard]] const std::shared_ptr<Host>& host() const { return host_; }

  [[nodiscard]] bool applies(const Version& version) const override;
  [[nodiscard]] bool has_room(const Version& version) const override;
  [[nodiscard]] Place leave(Version& version) override;
  [[nodiscard]] Place bring_back(Version& version) override;
  [[nodiscard]] bool has_arrived(const Version& version) const override;
  [[nodiscard]] Place wait(Version& version) override;
  void turn_back(Version& version) override;
  void discard(Version& version) override;

 private:
  struct Moved {
    c10::Device device;
    std::unique_ptr<Host::Copy> copy;
    SharedBytes leaves;  // while it does: whoever ends that early needs the memory to be still there
    Place place = Place::kLeaving;
  };

  [[nodiscard]] LinkFigures figures() const override;
  [[nodiscard]] std::size_t queued_in() const override { return coming_; }
  [[nodiscard]] TensorDomain& domain() const;
  // The current stream of a device, after which all that the domain has run is over.
  [[nodiscard]] c10::Stream enter(c10::Device device) const;
  void learn_of_waits();

  const std::shared_ptr<Host> host_;
  const std::shared_ptr<Host::Waits> waits_ = std::make_shared<Host::Waits>();
  // A copy is found by the address of its version: whoever discards it may be the version's destructor.
  std::unordered_map<const Version*, Moved> moved_;
  std::size_t coming_ = 0;  // bytes
};

// As measured of late; for a level that may drop its versions as well, or not.
[[nodiscard]] LinkOptions link_to(Host& host, bool drops);
// That of all levels of `domain`.
[[nodiscard]] Way& way_to(TensorDomain& domain, const std::shared_ptr<Host>& host);

}  // namespace rematfn
