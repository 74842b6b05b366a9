// SPDX-License-Identifier: Apache-2.0
#include "tensors/settings.h"

#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <cstring>

#include "base/errors.h"
#include "base/thread_local.h"
#include "tensors/context_layout.h"
#include "tensors/setting_names.h"

// Where torch has them, OpenMP's and MKL's own: to ask is less work, and at::set_num_threads would set the
// number for threads that are yet to begin as well. MKL's returns what it was, 0 if that was never set.
extern "C" {
__attribute__((weak)) int omp_get_max_threads();
__attribute__((weak)) void omp_set_num_threads(int number);
__attribute__((weak)) int MKL_Set_Num_Threads_Local(int number);
}

namespace rematfn {

std::atomic<std::uint32_t> settings_changes{0};

namespace {

REMATFN_THREAD_LOCAL const Settings* latest = nullptr;
// How many scopes of this thread have changed those of the process.
REMATFN_THREAD_LOCAL int changed_here = 0;
std::atomic<bool> seen_by_others{false};
const Settings* changed_from = nullptr;  // by whoever changed them

bool are_changing(std::uint32_t changes) { return (changes & 1U) != 0; }

// The flags that tell of what has happened are not the program's.
std::uint64_t processor_control() {
#if defined(__SSE__)
  return _mm_getcsr() & ~0x3FU;
#elif defined(__aarch64__)
  std::uint64_t control = 0;
  __asm__ volatile("mrs %0, fpcr" : "=r"(control));
  return control;
#else
  return 0;
#endif
}

void set_processor_control([[maybe_unused]] std::uint64_t control) {
#if defined(__SSE__)
  _mm_setcsr(static_cast<unsigned>(control) | (_mm_getcsr() & 0x3FU));
#elif defined(__aarch64__)
  __asm__ volatile("msr fpcr, %0" : : "r"(control));
#endif
}

}  // namespace

Settings::OfThread Settings::OfThread::now() {
  static const bool is_rocm = at::Context::hasROCM();
  return {.threads = omp_get_max_threads == nullptr ? at::get_num_threads() : omp_get_max_threads(),
          .arithmetic = processor_control(),
          .without_tf32 = at::NoTF32Guard::should_disable_tf32(),
          .in_backward = is_rocm && at::ROCmBackwardPassGuard::is_backward_pass()};
}

Settings::Settings()
    : default_dtype_(c10::get_default_dtype_as_scalartype()), thread_(OfThread::now()) {
  const ContextParts& parts = parts_of_context();
  context_.assign(parts.settings.begin(), parts.settings.end());
  for (const auto& precision : parts.precisions) {
    precisions_.emplace_back(precision.value, *precision.value);
  }
  described_ = describe_settings();
}

bool Settings::are_present() const {
  for (const auto& [place, value] : precisions_) {
    if (*place != value) return false;
  }
  return std::memcmp(context_.data(), parts_of_context().settings.data(), context_.size()) == 0 &&
         default_dtype_ == c10::get_default_dtype_as_scalartype() && thread_ == OfThread::now();
}

bool Settings::are_of_same_process(const Settings& other) const {
  return context_ == other.context_ && precisions_ == other.precisions_ &&
         default_dtype_ == other.default_dtype_;
}

const Settings& Settings::find_present() {
  static std::atomic<const Settings*> newest{nullptr};
  const Settings* first = newest;
  for (const Settings* known = first; known != nullptr; known = known->older_) {
    if (known->are_present()) return *known;
  }
  auto* made = new Settings;
  made->older_ = first;
  while (!newest.compare_exchange_weak(made->older_, made)) {
  }
  return *made;
}

// See Note [Settings are compared, not watched]
const Settings& Settings::present() {
  for (;;) {
    const std::uint32_t changes = settings_changes.load(std::memory_order_acquire);
    const Settings* settings = latest;
    if (settings == nullptr || !settings->are_present()) settings = latest = &find_present();
    if (changed_here > 0) return *settings;
    if (are_changing(changes)) seen_by_others = true;
    if (settings_changes.load() == changes) return *settings;
  }
}

// Only what differs: what another thread sets meanwhile stays.
void Settings::set_for_process() const {
  const ContextParts& parts = parts_of_context();
  for (std::size_t i = 0; i < context_.size(); ++i) {
    if (parts.settings[i] != context_[i]) parts.settings[i] = context_[i];
  }
  for (const auto& [place, value] : precisions_) *place = value;
  if (default_dtype_ != c10::get_default_dtype_as_scalartype()) {
    c10::set_default_dtype(c10::scalarTypeToTypeMeta(default_dtype_));
  }
}

std::string Settings::changes_to(const Settings& now) const {
  std::string text;
  for (std::size_t i = 0; i < described_.size(); ++i) {
    const auto& [name, value] = described_[i];
    if (value == now.described_[i].second) continue;
    if (!text.empty()) text += "; ";
    text += "`" + name + "` was " + value + " and is " + now.described_[i].second;
  }
  return text.empty() ? "a setting of torch's differs" : text;
}

SettingsScope::SettingsScope(const Settings& then, const std::string& op)
    : then_(then), now_(Settings::present()), op_(op) {
  if (&then_ == &now_) return;
  if (!then_.are_of_same_process(now_)) {
    std::uint32_t changes = settings_changes;
    if (changed_here == 0) {
      if (are_changing(changes) || !settings_changes.compare_exchange_strong(changes, changes + 1)) {
        raise_shared();
      }
      changed_from = &now_;
    }
    ++changed_here;
    changes_process_ = true;
    then_.set_for_process();
  }
  active_ = true;
  set_for_thread(then_.thread_);
}

bool SettingsScope::restore() {
  if (!active_) return false;
  active_ = false;
  set_for_thread(now_.thread_);
  if (!changes_process_) return false;
  now_.set_for_process();
  if (--changed_here > 0) return false;
  ++settings_changes;
  return seen_by_others.exchange(false);
}

void SettingsScope::set_for_thread(const Settings::OfThread& to) {
  const Settings::OfThread from = Settings::OfThread::now();
  if (to.arithmetic != from.arithmetic) set_processor_control(to.arithmetic);
  if (to.without_tf32 != from.without_tf32) set_without_tf32(to.without_tf32);
  if (to.in_backward != from.in_backward) set_in_backward(to.in_backward);
  if (to.threads == from.threads) return;
  if (omp_set_num_threads == nullptr) return at::set_num_threads(to.threads);
  omp_set_num_threads(to.threads);
  if (MKL_Set_Num_Threads_Local == nullptr) return;
  threads_of_mkl_ = MKL_Set_Num_Threads_Local(active_ ? to.threads : threads_of_mkl_);
}

void SettingsScope::end() {
  if (restore()) raise_shared();
}

void SettingsScope::raise_shared() const {
  check_replay(false, "`" + op_ + "` has to run with the settings of its first run, which are the whole "
                      "process's, and another thread ran operators, too (" + then_.changes_to(now_) +
                      "). Give forward and backward the same settings, or let no other thread run "
                      "operators during the backward");
}

void note_seen_by_thread() {
  if (changed_here == 0 && !at::in_parallel_region()) seen_by_others = true;
}

void settle_settings_after_fork() {
  if (!are_changing(settings_changes) || changed_here > 0) return;
  changed_from->set_for_process();
  ++settings_changes;
  seen_by_others = false;
}

}  // namespace rematfn
