// SPDX-License-Identifier: Apache-2.0
//
// settings.h: what torch is told besides arguments, and its kernels ask: as they were.
//
// Note [Settings are compared, not watched]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Which kernel runs, and how it calculates, is decided by some fifty settings besides its arguments. They
// have no version counter, and Python, C++ and torch's own guards set them in more ways than could be
// patched. To ask for each one at every operator would take longer than small operators do. Nor is it
// enough to ask at products and convolutions: the number of threads decides where a loop is divided, and
// with that which elements of any operator are calculated one by one and which by vectors. So the state is
// compared, as it lies in memory, with the last Settings of the thread, which takes two hundred instructions;
// only where it differs are others looked for, or made. There is one object for each state that has been
// met (or two, if two threads met it at once): settings with the same address are the same. None is ever
// freed; a program has few.
//
// Of the process:
//   - all that lies in at::Context: cudnn, mkldnn, miopen, nnpack, quantized engines; TF32, reduced precision
//     and accumulation; attention kernels and their order; libraries for BLAS and linear algebra;
//     deterministic algorithms, filled memory; and what no kernel's result depends on, but is as cheap;
//   - the default dtype.
// Of the thread:
//   - how many threads a loop is divided among, by OpenMP and by MKL (torch sets both to one number);
//   - how the processor rounds, and whether it flushes denormal numbers to zero. OpenMP's own threads have
//     that from the thread that made them, and keep it: a replay runs on the same ones;
//   - torch's marks for regions without TF32 (linalg.pinv) and, on ROCm, for a backward pass;
//   - grad mode, which templates of calls have: it changes too often.
// Not here, since nothing below our key asks for it: autocast, inference mode, default device, modes,
// hooks, functorch's and forward mode's levels, named tensors, fast paths that torch chooses in Python
// (torch.backends.mha, opt_einsum). Not here, since results do not depend on it: the pool of threads of
// XNNPACK and QNNPACK, which divides outputs, not sums; inter-op threads; caches and plans of FFTs. Random
// numbers: rng.h. What an accelerator's library has chosen by timing is no setting and cannot be
// restored: docs/limitations.md.
//
// Note [A thread takes over torch's number of threads]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A new thread has OpenMP's number of threads, the system's or OMP_NUM_THREADS, until its first loop that torch
// divides; there, once, torch sets its own. So the operator in which that happens has run with a number that
// was not there when it began: it is replayed with the one that is there after it. A replay may be what has a
// thread's first loop. Under settings of its own it would use up torch's once, and what the program runs next
// would keep OpenMP's number for good: so a replay has torch set its number before it looks what is there.
//
// Note [Settings of the process are changed for a replay]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A kernel reads Context itself, so the only way to have it see another state is to write that there, for
// as long as the kernel runs. Most replays find the state that they need. For one that does not, only what
// differs is written, and written back. Another thread that ran an operator meanwhile may have taken
// another kernel than it should have, and we cannot stop it: most operators of other threads do not come
// to us. But nearly all of them allocate, and our allocator sees that. So who changes the settings looks
// afterwards whether another thread has allocated, and if so the replay is an error that names the
// settings. (The threads of the kernel's own loops are not others.) A thread whose operator under a level
// asks for its settings meanwhile counts as such, and takes none for its own that were another's:
// `settings_changes` is odd while they are, and has changed if they were. Two threads never change the
// settings at once.

#pragma once

#include <ATen/Context.h>
#include <c10/core/ScalarType.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace rematfn {

class Settings {
 public:
  // Those that this thread has now. The same state has the same address.
  [[nodiscard]] static const Settings& present();
  // Whether this thread divides its loops among as many threads.
  [[nodiscard]] bool has_threads() const { return thread_.threads == OfThread::threads_now(); }

 private:
  friend class SettingsScope;
  friend void settle_settings_after_fork();

  struct OfThread {
    [[nodiscard]] static OfThread now();
    [[nodiscard]] static int threads_now();
    bool operator==(const OfThread&) const = default;
    int threads;
    std::uint64_t arithmetic;  // the processor's control register
    bool without_tf32;
    bool in_backward;  // on ROCm
  };

  Settings();
  [[nodiscard]] static const Settings& present_of_begun_thread();
  [[nodiscard]] static const Settings& find_present();
  [[nodiscard]] bool are_present() const;
  [[nodiscard]] bool are_of_same_process(const Settings& other) const;
  void set_for_process() const;
  // "`torch.backends.cudnn.enabled` was True and is False", where `now` differs.
  [[nodiscard]] std::string changes_to(const Settings& now) const;

  std::vector<std::byte> context_;
  std::vector<std::pair<at::Float32Precision*, at::Float32Precision>> precisions_;  // where, and what
  c10::ScalarType default_dtype_;
  OfThread thread_;
  std::vector<std::pair<std::string, std::string>> described_;
  const Settings* older_ = nullptr;  // what was met before
};

// For a scope: this thread's settings are `then`, and afterwards what they were before.
class SettingsScope {
 public:
  // `op` is for messages.
  SettingsScope(const Settings& then, const std::string& op);
  ~SettingsScope() { restore(); }
  SettingsScope(const SettingsScope&) = delete;
  SettingsScope& operator=(const SettingsScope&) = delete;

  // Ends it. A ReplayError if another thread may have seen settings that were not its own.
  void end();

 private:
  // Whether another thread may have.
  bool restore();
  void set_for_thread(const Settings::OfThread& to);
  void raise_shared() const;

  const Settings& then_;
  const Settings& now_;
  const std::string& op_;
  bool active_ = false;
  bool changes_process_ = false;
  int threads_of_mkl_ = 0;
};

// See Note [Settings of the process are changed for a replay]
extern std::atomic<std::uint32_t> settings_changes;
void note_seen_by_thread();
// A tensor is allocated on this thread.
inline void note_allocation() {
  if ((settings_changes.load(std::memory_order_relaxed) & 1U) != 0) [[unlikely]] note_seen_by_thread();
}

// Note [A fork leaves OpenMP's threads behind]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A child has one thread, and OpenMP does not know: the first loop that it divides waits for others, for ever. So
// workers set the number of threads to one, as those of a DataLoader do. A replay takes that of the first run. So
// OpenMP ends its threads before a fork; it begins new ones, in each of the two processes, when it wants them.
void end_threads_of_loops();

// In a forked child: another thread of the parent's may have changed them for a replay.
void settle_settings_after_fork();

}  // namespace rematfn
