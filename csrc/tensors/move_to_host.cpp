// SPDX-License-Identifier: Apache-2.0
#include "tensors/move_to_host.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <utility>

#include "base/errors.h"
#include "tensors/level_tensor.h"
#include "tensors/profiled.h"
#include "tensors/tensor_store.h"
#include "tensors/thread_keys.h"

namespace rematfn {
namespace {

constexpr double kHostLatency = 2e-5;  // seconds: of a transfer, however small
constexpr double kUnknownHostBandwidth = 1e10;  // bytes per second

LinkFigures figures_of(const Host& host) {
  return {kHostLatency, seconds_per_byte(host.bandwidth_out(), kUnknownHostBandwidth),
          seconds_per_byte(host.bandwidth_in(), kUnknownHostBandwidth),
          /*one_way_at_a_time=*/false, /*drag=*/0};
}

// See Note [Nothing moves while a stream is captured]
void refuse_if_captured(c10::Device device) {
  if (!Host::is_captured(device)) return;
  raise(ErrorKind::kOffload,
        "A value that was moved to the host, or is on its way, is needed while a stream is captured in a "
        "graph. Call rematfn.materialize(x) on what the capture reads before it begins, raise the budget, "
        "or capture a function that moves nothing.");
}

}  // namespace

MoveToHost::MoveToHost(TensorDomain& domain, std::shared_ptr<Host> host)
    : Link(domain), host_(std::move(host)) {}

TensorDomain& MoveToHost::domain() const { return static_cast<TensorDomain&>(ledger_); }

c10::Stream MoveToHost::enter(c10::Device device) const {
  domain().streams.enter(device);
  return c10::impl::getDeviceGuardImpl(device.type())->getStream(device);
}

bool MoveToHost::applies(const Version& version) const {
  if (tensor_store.lost(version)) return true;  // has_room() knows
  const c10::DeviceType type = tensor_version(version).current_storage().device_type();
  return type != c10::kCPU && type != c10::kMeta;
}

// See Note [Copies are in stream order]
bool MoveToHost::has_room(const Version& version) const {
  if (version.nbytes == 0 || !host_->has_room(version.nbytes) || tensor_store.lost(version)) {
    return false;
  }
  return !Host::is_captured(tensor_version(version).current_storage().device());
}

Place MoveToHost::leave(Version& version) {
  const Profiled range("rematfn::move", "to the host");
  learn_of_waits();
  const c10::Storage bytes = tensor_version(version).current_storage();
  const c10::Device device = bytes.device();
  std::unique_ptr<Host::Copy> copy = host_->copy_out(bytes, enter(device));
  if (!copy) return Place::kHere;
  moved_.emplace(&version, Moved{device, std::move(copy), SharedBytes(bytes)});
  return Place::kLeaving;
}

bool MoveToHost::has_arrived(const Version& version) const {
  return moved_.at(&version).copy->is_done();
}

Place MoveToHost::wait(Version& version) {
  Moved& moved = moved_.at(&version);
  refuse_if_captured(moved.device);
  const c10::Stream now = enter(moved.device);
  const bool several = domain().streams.are_several();
  learn_of_waits();
  if (moved.place == Place::kLeaving) {
    if (several) moved.copy->protect(moved.leaves.data_ptr());
    moved.copy->precede(now, waits_);
    moved.leaves.reset();
    if (tensor_store.taken_meanwhile(version)) {
      moved_.erase(&version);
      return Place::kHere;
    }
    tensor_store.drop(version);
    return moved.place = Place::kAway;
  }
  if (moved.copy->is_done()) note_early(version);
  moved.copy->precede(now, waits_, version.value);
  const BackendScope scope;
  refill(tensor_version(version), moved.copy->take());
  coming_ -= version.nbytes;
  moved_.erase(&version);
  return Place::kHere;
}

Place MoveToHost::bring_back(Version& version) {
  const Profiled range("rematfn::move", "from the host");
  learn_of_waits();
  Moved& moved = moved_.at(&version);
  refuse_if_captured(moved.device);
  const BackendScope scope;
  moved.copy->bring_in(enter(moved.device));
  coming_ += version.nbytes;
  return moved.place = Place::kComing;
}

void MoveToHost::turn_back(Version& version) {
  Moved& moved = moved_.at(&version);
  moved.copy->precede(enter(moved.device));
  const c10::Storage room = moved.copy->take();
  if (domain().streams.are_several()) moved.copy->protect(room.data_ptr());
  coming_ -= version.nbytes;
  moved.place = Place::kAway;
  note_turned_back(version);
}

// What is leaving may be freed now. See Note [Copies are in stream order], 6.
void MoveToHost::discard(Version& version) {
  Moved& moved = moved_.at(&version);
  if (moved.place == Place::kComing) coming_ -= version.nbytes;
  if (moved.place == Place::kLeaving) moved.copy->protect(moved.leaves.data_ptr());
  moved_.erase(&version);
}

void MoveToHost::learn_of_waits() {
  ledger_.root->statistics.waited += waits_->take_seconds();
  for (const std::uint64_t value : waits_->take_late()) note_late(static_cast<Trace::Id>(value));
}

Way& way_to(TensorDomain& domain, const std::shared_ptr<Host>& host) {
  for (const std::unique_ptr<Way>& way : domain.ways) {
    const auto* move = dynamic_cast<MoveToHost*>(way.get());
    if (move != nullptr && move->host() == host) return *way;
  }
  return *domain.ways.emplace_back(std::make_unique<MoveToHost>(domain, host));
}

// ---- how fast ---------------------------------------------------------------------------------

LinkFigures MoveToHost::figures() const { return figures_of(*host_); }

LinkOptions link_to(Host& host, bool drops) {
  return {figures_of(host), host.statistics().capacity, drops};
}

}  // namespace rematfn
