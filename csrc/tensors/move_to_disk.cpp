// SPDX-License-Identifier: Apache-2.0
#include "tensors/move_to_disk.h"

#include <c10/core/CPUAllocator.h>

#include <chrono>
#include <optional>
#include <utility>

#include "engine/domain.h"
#include "memory/pages.h"
#include "tensors/profiled.h"
#include "tensors/tensor_store.h"
#include "tensors/thread_keys.h"

namespace rematfn {
namespace {

constexpr double kDiskLatency = 1e-4;  // seconds: of a transfer, however small
// Measured: on two cores, kept busy in both directions, a step takes 1.18 of its time.
constexpr double kDrag = 0.18;
constexpr double kUnknownDiskBandwidth = 1e9;  // bytes per second

// What moving takes is to be compared with replays before anything has moved. Where all moves, transfers
// tell soon enough: on the disk of one machine a probe took 0.06 to 0.11 s.
void find_bandwidth(Disk& disk) {
  if (disk.read_bandwidth() == 0) disk.probe();
}

LinkFigures figures_of(const Disk& disk) {
  return {kDiskLatency, seconds_per_byte(disk.write_bandwidth(), kUnknownDiskBandwidth),
          seconds_per_byte(disk.read_bandwidth(), kUnknownDiskBandwidth), /*one_way_at_a_time=*/true, kDrag};
}

}  // namespace

MoveToDisk::MoveToDisk(Domain& domain, std::shared_ptr<Disk> disk)
    : Link(domain), disk_(std::move(disk)) {}

bool MoveToDisk::applies(const Version& version) const {
  if (tensor_store.lost(version)) return true;  // has_room() knows
  return tensor_version(version).current_storage().device_type() == c10::DeviceType::CPU;
}

bool MoveToDisk::has_room(const Version& version) const {
  return disk_->has_room(version.nbytes) && !tensor_store.lost(version);
}

Place MoveToDisk::leave(Version& version) {
  const Profiled range("rematfn::move", "to the disk");
  const c10::Storage bytes = tensor_version(version).current_storage();
  std::unique_ptr<Disk::Copy> copy = disk_->write(bytes.data(), version.nbytes);
  if (!copy) return Place::kHere;
  note_copy(time_out(version.nbytes));
  moved_.emplace(&version, Moved{SharedBytes(bytes), {}, std::move(copy)});
  return Place::kLeaving;
}

bool MoveToDisk::has_arrived(const Version& version) const {
  return moved_.at(&version).copy->is_done();
}

Place MoveToDisk::wait(Version& version) {
  Moved& moved = moved_.at(&version);
  const bool was_leaving = version.place == Place::kLeaving;
  const bool is_late = !moved.copy->is_done();
  std::optional<Profiled> range;
  if (is_late) range.emplace("rematfn::wait", was_leaving ? "to the disk" : "from the disk");
  const Clock::time_point before = is_late ? Clock::now() : Clock::time_point();
  try {
    moved.copy->wait();
  } catch (const DiskError& error) {
    if (!was_leaving) {
      moved.comes_to = c10::Storage();
      throw CopyLost(error.what());
    }
    discard(version);
    return Place::kHere;
  }
  if (is_late) {
    note_waited(before);
    if (!was_leaving) note_late(version.value);
  } else if (!was_leaving) {
    note_early(version);
  }
  if (was_leaving) {
    moved.leaves.reset();
    if (tensor_store.taken_meanwhile(version)) {
      discard(version);
      return Place::kHere;
    }
    tensor_store.drop(version);
    return Place::kAway;
  }
  const BackendScope scope;
  refill(tensor_version(version), std::move(moved.comes_to));
  discard(version);
  return Place::kHere;
}

Place MoveToDisk::bring_back(Version& version) {
  const Profiled range("rematfn::move", "from the disk");
  Moved& moved = moved_.at(&version);
  const BackendScope scope;
  const WillBeFilled filled;
  c10::Allocator* const allocator = c10::GetCPUAllocator();
  moved.comes_to = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), version.nbytes, allocator->allocate(version.nbytes),
      allocator, /*resizable=*/true));
  try {
    moved.copy->read(moved.comes_to.mutable_data());
  } catch (const DiskError& error) {
    moved.comes_to = c10::Storage();
    throw CopyLost(error.what());
  }
  note_copy(time_in(version.nbytes));
  return Place::kComing;
}

void MoveToDisk::turn_back(Version& version) {
  Moved& moved = moved_.at(&version);
  try {
    moved.copy->wait();
  } catch (const DiskError&) {
    // whoever asks for it will hear of it
  }
  moved.comes_to = c10::Storage();
  note_turned_back(version);
}

// A chunk that is under way is waited for.
void MoveToDisk::discard(Version& version) {
  const auto moved = moved_.find(&version);
  const bool is_late = !moved->second.copy->is_done();
  const Clock::time_point before = is_late ? Clock::now() : Clock::time_point();
  moved_.erase(moved);
  if (is_late) note_waited(before);
}

void MoveToDisk::note_waited(Clock::time_point since) {
  const std::chrono::duration<double> waited = Clock::now() - since;
  ledger_.root->statistics.waited += waited.count();
}

Way& way_to(TensorDomain& domain, const std::shared_ptr<Disk>& disk, bool drops) {
  if (drops) find_bandwidth(*disk);
  for (const std::unique_ptr<Way>& way : domain.ways) {
    const auto* move = dynamic_cast<MoveToDisk*>(way.get());
    if (move != nullptr && move->disk() == disk) return *way;
  }
  return *domain.ways.emplace_back(std::make_unique<MoveToDisk>(domain, disk));
}

// ---- how fast ---------------------------------------------------------------------------------

LinkFigures MoveToDisk::figures() const { return figures_of(*disk_); }

LinkOptions link_to(Disk& disk, bool drops) {
  if (drops) find_bandwidth(disk);
  return {figures_of(disk), disk.statistics().capacity, drops, /*clocked=*/true};
}

}  // namespace rematfn
