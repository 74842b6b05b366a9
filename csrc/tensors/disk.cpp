// SPDX-License-Identifier: Apache-2.0
#include "tensors/disk.h"

#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <set>
#include <stdexcept>
#include <utility>

#include "base/interpreter.h"
#include "memory/checksum.h"

namespace rematfn {
namespace {

constexpr int kCorrupted = -2;  // beside an errno and ScratchFile::kTruncated

bool is_full(int error) { return error == ENOSPC || error == EDQUOT || error == EFBIG; }

class Disk final : public Tier, public std::enable_shared_from_this<Disk> {
 public:
  // Measured: on two cores, kept busy in both directions, a step takes 1.18 of its time.
  Disk(const DiskOptions& options, const FileCalls& calls)
      : Tier("disk", /*is_for_accelerators=*/false,
             {.latency = 1e-4,
              .per_byte_out = 1e-9,
              .per_byte_in = 1e-9,
              .one_way_at_a_time = true,
              .drag = 0.18,
              .clocked = true}),
        options_(options),
        calls_(calls),
        state_(std::make_unique<State>(options)) {
    check_scratch_folder(options.folder);
    const std::lock_guard guard(forking);
    disks.insert(this);
  }
  ~Disk() override {
    const std::lock_guard guard(forking);
    disks.erase(this);
  }

  [[nodiscard]] std::unique_ptr<Copy> put(const c10::Storage& bytes, TensorDomain&,
                                          std::shared_ptr<Waits> waits) override {
    auto copy = make_copy(bytes.nbytes(), bytes.device(), std::move(waits));
    if (copy) copy->begin(/*out=*/true, bytes);
    return copy;
  }
  [[nodiscard]] bool has_room_for_copy(std::size_t nbytes) const override { return account().has_room(nbytes); }
  [[nodiscard]] std::unique_ptr<Copy> take_over(const Copy& packed, std::shared_ptr<Waits> waits) override {
    auto copy = make_copy(packed.nbytes, packed.device, std::move(waits));
    if (!copy) return nullptr;
    copy->sum = packed.sum;
    copy->packed_ = &packed;
    copy->begin(/*out=*/true);
    copy->note_wait(state_->transfers.wait(*copy), /*returning=*/false);
    copy->packed_ = nullptr;
    return copy->written_ ? std::move(copy) : nullptr;
  }
  void try_again() override {
    const std::lock_guard guard(state_->transfers.mutex);
    state_->account.try_again();
  }
  // Writes and reads 4 MiB, in a file of its own, which are not counted.
  void find_bandwidth() override {
    constexpr std::size_t kBytes = 4 * Bounce::kSize;
    TierAccount& account = state_->account;
    if (account.in.bandwidth > 0 || !account.has_room(kBytes)) return;
    const WithoutInterpreter scope;
    try {
      ScratchFile file(options_.folder, calls_);
      Bounce bounce;
      char* const memory = bounce.get();
      if (memory == nullptr) return;
      std::uint32_t word = 1;  // not zeros, which some disks are clever about
      std::generate_n(memory, Bounce::kSize, [&] { return (word = word * 1664525U + 1013904223U) >> 24; });
      const auto moves = [&](TierAccount::Traffic& traffic, const auto& move) {
        const auto begin = std::chrono::steady_clock::now();
        for (std::size_t at = 0; at < kBytes; at += Bounce::kSize) {
          if (move(at) != 0) return false;
        }
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        const std::lock_guard guard(state_->transfers.mutex);
        traffic.note(kBytes, std::max(took.count(), kBytes / options_.transfers.bandwidth));
        return true;
      };
      if (!moves(account.out, [&](std::size_t at) { return file.write(memory, Bounce::kSize, at, bounce); })) return;
      moves(account.in, [&](std::size_t at) { return file.read(memory, Bounce::kSize, at, bounce); });
    } catch (const std::exception&) {
      // who writes there next is told
    }
  }
  [[nodiscard]] TierFigures figures() override {
    const std::lock_guard guard(state_->transfers.mutex);
    return account().figures();
  }

 private:
  // What a fork leaves to the parent. See Note [No transfer runs across a fork]
  struct State {
    explicit State(const DiskOptions& options)
        : account(options.budget), transfers(options.transfers, account) {}

    TierAccount account;
    std::unique_ptr<ScratchFile> file;
    Transfers transfers;
  };

  // They outlive what is destroyed at exit.
  inline static std::mutex& forking = *new std::mutex;
  inline static std::set<Disk*>& disks = *new std::set<Disk*>;

  // ---- forks --------------------------------------------------------------------------------------

  // Note [No transfer runs across a fork]
  // ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
  // A direct read puts bytes into pages that the kernel has taken down by their place in memory. If the
  // process forks meanwhile, and then writes to such a page, older kernels give it a copy of the page,
  // and what is read comes to the other one: open(2) forbids the two together. So a fork waits for the
  // chunks that are under way, and none begins until it is over. Whoever forks may not hold what a waiter
  // for a copy needs: that is why these handlers are registered before all others of ours, and so run
  // last before the fork.
  // In the child the threads do not exist, and the file is the parent's: what was made before is lost
  // there, the file is closed, and the first write makes another. What the parent's threads may have waited
  // for is not touched any more, nor freed: its lock is held, and threads are missing that waited.
  static void before_fork() {
    forking.lock();
    for (Disk* disk : disks) disk->state_->transfers.pause();
  }
  static void after_fork_in_parent() {
    for (Disk* disk : disks) disk->state_->transfers.resume();
    forking.unlock();
  }
  static void after_fork_in_child() {
    for (Disk* disk : disks) {
      disk->state_.release()->file.reset();
      disk->state_ = std::make_unique<State>(disk->options_);
    }
    forking.unlock();
  }
  // When the library is loaded, and so before all others.
  inline static const int watching_forks =
      pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child);

  // ---- copies -------------------------------------------------------------------------------------

  // The bytes of one value. What is queued when it is discarded is cancelled; a chunk that is under way is
  // waited for. One thread uses it at a time.
  class Bytes final : public Tier::Copy, private Transfers::Transfer {
   public:
    Bytes(std::shared_ptr<Disk> disk, std::size_t bytes, c10::Device of, std::shared_ptr<Waits> waits)
        : Copy(bytes, of, std::move(waits)), Transfer(bytes), disk_(std::move(disk)), state_(*disk_->state_) {}
    ~Bytes() override {
      if (is_lost()) return;
      note_wait(state_.transfers.cancel(*this), /*returning=*/false);
      const std::lock_guard guard(state_.transfers.mutex);
      give_back();
    }

    [[nodiscard]] bool is_done() const override { return Transfer::is_done() || is_lost(); }

    void wait(bool returning) override {
      if (!is_lost()) note_wait(state_.transfers.wait(*this), returning);
      throw_if_lost();
      if (error_.empty() && comes_to_ && sum && checksum(static_cast<const char*>(comes_to_.data()), nbytes) != *sum) {
        error_ = describe(/*out=*/false, kCorrupted);
      }
      if (error_.empty()) return;
      comes_to_ = c10::Storage();
      throw CopyLost(error_);
    }

    void get(c10::Storage to) override {
      throw_if_lost();
      if (!is_done()) throw std::logic_error("what is under way cannot be read");
      if (!written_) throw CopyLost(error_);
      error_.clear();
      comes_to_ = std::move(to);
      begin(/*out=*/false, comes_to_);
    }

    void turn_back() override {
      if (!is_lost()) state_.transfers.wait(*this);  // whoever asks for it will hear of an error
      comes_to_ = c10::Storage();
    }

   private:
    friend class Disk;

    [[nodiscard]] bool is_lost() const { return &state_ != disk_->state_.get(); }
    void throw_if_lost() const {
      if (!is_lost()) return;
      throw CopyLost(said_of(disk_->options_.folder) +
                     "what was moved there before a fork cannot be had in the child. Call the function "
                     "anew there.");
    }

    void note_wait(double seconds, bool returning) const {
      if (seconds > 0) waits_->add(seconds, returning);
    }

    void begin(bool out, const c10::Storage& bytes) {
      memory_ = static_cast<char*>(const_cast<void*>(bytes.data()));  // which is only read if it goes out
      begin(out);
    }
    void begin(bool out) {
      written_ |= nbytes == 0;
      if (nbytes > 0) state_.transfers.begin(*this, out, std::unique_lock(state_.transfers.mutex));
    }

    void give_back() {
      if (offset_) state_.account.give_back(*std::exchange(offset_, std::nullopt), nbytes);
    }

    [[nodiscard]] int move(bool out, std::size_t begin, std::size_t count, Bounce& bounce) override {
      std::unique_ptr<char, decltype(&std::free)> read{nullptr, &std::free};
      if (packed_ != nullptr) {
        read.reset(static_cast<char*>(std::aligned_alloc(TierAccount::kUnit, TierAccount::rounded(count))));
        if (!read) return ENOMEM;
        packed_->read(begin, count, read.get());
      }
      char* const memory = read ? read.get() : memory_ + begin;
      const std::size_t offset = *offset_ + begin;
      const auto sum = [&] { return checksum(memory, count); };
      const auto kept = [&]() -> std::uint64_t& { return checksums_[begin / state_.transfers.chunk()]; };
      const bool verifies = !checksums_.empty();
      if (out) {
        if (verifies) kept() = sum();
        return state_.file->write(memory, count, offset, bounce);
      }
      const int error = state_.file->read(memory, count, offset, bounce);
      return error == 0 && verifies && sum() != kept() ? kCorrupted : error;
    }

    // Where the disk is full before its budget, copies can be made as others go, and by later calls; where it
    // fails, none can be any more. That memory is short passes.
    void end(bool out, int error) override {
      if (error == 0) {
        written_ = true;
        return;
      }
      error_ = describe(out, error);
      if (out) give_back();
      if (is_full(error) && out) {
        state_.account.limit_to_held(error_);
      } else if (error != ENOMEM) {
        state_.account.limit(0, error_);
      }
    }

    [[nodiscard]] std::string describe(bool out, int error) const {
      const std::string text = said_of(disk_->options_.folder) + "could not " +
                               (out ? "write " : "read back ") + std::to_string(nbytes) + " bytes: ";
      if (error == kCorrupted) return text + "they are not what was written. Name a directory on another disk.";
      if (error == ScratchFile::kTruncated) {
        return text + "the file has become shorter. Name a directory where nobody cuts it.";
      }
      return text + describe_error(error) +
             (is_full(error) ? ". Make room there, give it a smaller budget, or name another directory."
              : error == ENOMEM ? ". Leave the process more memory, or more addresses."
                                : ". Name a directory on another disk.");
    }

    const std::shared_ptr<Disk> disk_;
    State& state_;
    std::optional<std::size_t> offset_;
    char* memory_ = nullptr;
    const Copy* packed_ = nullptr;  // what it is written from, if not from memory
    bool written_ = false;  // as a whole
    std::string error_;
    std::vector<std::uint64_t> checksums_;  // by chunk
  };

  [[nodiscard]] const TierAccount& account() const override { return state_->account; }
  // Under the lock: where so many bytes can be written, in a file that is open; or nothing.
  [[nodiscard]] std::optional<std::size_t> take(std::size_t nbytes) {
    State& state = *state_;
    if (!state.account.has_room(nbytes)) return std::nullopt;
    try {
      if (!state.file) {
        auto file = std::make_unique<ScratchFile>(options_.folder, calls_);
        state.transfers.start();
        state.file = std::move(file);
      }
    } catch (const std::exception& error) {
      state.account.limit(0, error.what());
      return std::nullopt;
    }
    return state.account.take(nbytes);
  }
  // One that has a place, with nothing in it. Null if there is no room.
  [[nodiscard]] std::unique_ptr<Bytes> make_copy(std::size_t nbytes, c10::Device device,
                                                 std::shared_ptr<Waits> waits) {
    auto copy = std::make_unique<Bytes>(shared_from_this(), nbytes, device, std::move(waits));
    if (nbytes == 0) return copy;
    const std::lock_guard guard(state_->transfers.mutex);
    copy->offset_ = take(nbytes);
    if (!copy->offset_) return nullptr;
    const std::size_t chunk = state_->transfers.chunk();
    if (options_.verify) copy->checksums_.resize((nbytes + chunk - 1) / chunk);
    return copy;
  }

  const DiskOptions options_;
  const FileCalls calls_;
  std::unique_ptr<State> state_;
};

}  // namespace

std::shared_ptr<Tier> make_disk(const DiskOptions& options, const FileCalls& calls) {
  return std::make_shared<Disk>(options, calls);
}

}  // namespace rematfn
