// SPDX-License-Identifier: Apache-2.0
#include "memory/disk.h"

#include <algorithm>
#include <cstdint>
#include <system_error>
#include <utility>
#include <vector>

#include "base/interpreter.h"
#include "memory/disk_state.h"

namespace rematfn {
namespace {

constexpr std::size_t kFirstProbe = std::size_t{1} << 20;
constexpr std::size_t kProbe = std::size_t{16} << 20;
constexpr std::chrono::milliseconds kSoon(50);

}  // namespace

Disk::Disk(Options options) : Disk(std::move(options), FileCalls{}) {}

Disk::Disk(Options options, const FileCalls& calls) {
  check_scratch_folder(options.folder);
  state_ = State::make(std::move(options), calls, this);
}

Disk::~Disk() { state_->leave(); }

std::unique_ptr<Disk::Copy> Disk::write(const void* bytes, std::size_t nbytes) {
  return write(bytes, nbytes, /*counted=*/true);
}

std::unique_ptr<Disk::Copy> Disk::write(const void* bytes, std::size_t nbytes, bool counted) {
  auto transfer = std::make_unique<Transfer>();
  transfer->nbytes = nbytes;
  transfer->counted = counted;
  if (!state_->write(*transfer, static_cast<const char*>(bytes))) return nullptr;
  return std::unique_ptr<Copy>(new Copy(state_, std::move(transfer)));
}

bool Disk::has_room(std::size_t nbytes) const { return nbytes <= state_->room(); }
double Disk::write_bandwidth() const { return state_->out.bandwidth; }
double Disk::read_bandwidth() const { return state_->in.bandwidth; }
std::size_t Disk::queued_to_write() const { return state_->out.queued; }
std::size_t Disk::queued_to_read() const { return state_->in.queued; }
std::string Disk::trouble() const { return state_->trouble(); }
Disk::Statistics Disk::statistics() const { return state_->statistics(); }

bool Disk::probe() {
  for (const std::size_t nbytes : {kFirstProbe, kProbe}) {
    const auto begin = std::chrono::steady_clock::now();
    // Not zeros, which some disks are clever about; and of whole pages.
    std::vector<std::uint64_t> memory((nbytes + Slab::kAlignment) / sizeof(std::uint64_t));
    std::uint64_t word = 1;
    for (auto& each : memory) each = word = word * 6364136223846793005U + 1442695040888963407U;
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    char* const bytes = reinterpret_cast<char*>(memory.data()) +
                        (Slab::kAlignment - address % Slab::kAlignment) % Slab::kAlignment;
    const std::unique_ptr<Copy> copy = write(bytes, nbytes, /*counted=*/false);
    if (!copy) break;
    try {
      copy->wait();
      copy->read(bytes);
      copy->wait();
    } catch (const DiskError&) {
      break;  // trouble() tells
    }
    if (std::chrono::steady_clock::now() - begin > kSoon) break;  // slow enough to be known by that
  }
  return write_bandwidth() > 0 && read_bandwidth() > 0;
}

Disk::Copy::Copy(std::shared_ptr<State> state, std::unique_ptr<Transfer> transfer)
    : state_(std::move(state)), transfer_(std::move(transfer)) {}

Disk::Copy::~Copy() { state_->discard(*transfer_); }

std::size_t Disk::Copy::nbytes() const { return transfer_->nbytes; }

bool Disk::Copy::is_done() const {
  return transfer_->done.load(std::memory_order_acquire) || state_->is_lost();
}

// See Note [Who waits does not hold the interpreter]
void Disk::Copy::wait() {
  if (!is_done()) {
    const detail::WithoutInterpreter scope;
    state_->wait(*transfer_);
  }
  state_->throw_if_lost();
  if (!transfer_->error.empty()) throw DiskError(transfer_->error);
}

void Disk::Copy::read(void* to) {
  state_->throw_if_lost();
  if (!is_done()) throw std::logic_error("what is under way cannot be read");
  if (!transfer_->written) throw DiskError(transfer_->error);
  state_->read(*transfer_, static_cast<char*>(to));
}

}  // namespace rematfn
