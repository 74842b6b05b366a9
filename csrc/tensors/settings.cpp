// SPDX-License-Identifier: Apache-2.0
#include "tensors/settings.h"

#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/StringUtil.h>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include <array>
#include <cstring>
#include <new>
#include <span>

#include "base/errors.h"
#include "base/thread_local.h"
#include "tensors/torch_layout.h"

// Where torch has them, OpenMP's and MKL's own: to ask is less work, and at::set_num_threads would set the
// number for threads that are yet to begin as well. MKL's returns what it was, 0 if that was never set.
extern "C" {
__attribute__((weak)) int omp_get_max_threads();
__attribute__((weak)) void omp_set_num_threads(int number);
__attribute__((weak)) int omp_pause_resource_all(int kind);
__attribute__((weak)) int MKL_Set_Num_Threads_Local(int number);
}

namespace rematfn {

std::atomic<std::uint32_t> settings_changes{0};

// Where at::Context keeps its settings, for which it has getters that may throw and setters that may refuse
// what is already set. Assumes that all but the precisions lie side by side, from enabled_cudnn on up to
// fp32_precision, as plain values, and that this is a map without entries to come.
// tests/tensors/test_settings.py reads torch's header for members elsewhere.
REMATFN_REVEAL(FirstSetting, at::Context::enabled_cudnn)
REMATFN_REVEAL(Precisions, at::Context::fp32_precision)
REMATFN_REVEAL(ChangedTf32, at::NoTF32Guard::changed)

namespace {

std::span<std::byte> plain_settings() {
  static at::Context& context = at::globalContext();
  return {reinterpret_cast<std::byte*>(&(context.*reveal(FirstSetting()))),
          reinterpret_cast<std::byte*>(&(context.*reveal(Precisions())))};
}

// What torch's users call those that are on or off.
using Switch = std::pair<const char*, bool (at::Context::*)() const>;

// Those that differ between versions of torch have no name.
constexpr std::array kSwitches{
    Switch{"torch.use_deterministic_algorithms", &at::Context::deterministicAlgorithms},
    Switch{"torch.utils.deterministic.fill_uninitialized_memory",
           &at::Context::deterministicFillUninitializedMemory},
    Switch{"torch.backends.mkldnn.enabled", &at::Context::userEnabledMkldnn},
    Switch{"torch.backends.mkldnn.deterministic", &at::Context::deterministicMkldnn},
    Switch{"torch.backends.mkldnn.allow_tf32", &at::Context::allowTF32OneDNN},
    Switch{"torch.backends.cudnn.enabled", &at::Context::userEnabledCuDNN},
    Switch{"torch.backends.cudnn.benchmark", &at::Context::benchmarkCuDNN},
    Switch{"torch.backends.cudnn.deterministic", &at::Context::deterministicCuDNN},
    Switch{"torch.backends.miopen.immediate", &at::Context::immediateMiopen},
    Switch{"torch.backends.nnpack", &at::Context::userEnabledNNPACK},
    Switch{"torch.backends.cuda.enable_flash_sdp", &at::Context::userEnabledFlashSDP},
    Switch{"torch.backends.cuda.enable_mem_efficient_sdp", &at::Context::userEnabledMemEfficientSDP},
    Switch{"torch.backends.cuda.enable_math_sdp", &at::Context::userEnabledMathSDP},
    Switch{"torch.backends.cuda.enable_cudnn_sdp", &at::Context::userEnabledCuDNNSDP},
    Switch{"torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp",
           &at::Context::allowFP16BF16ReductionMathSDP},
    Switch{"torch.backends.cuda.matmul.allow_fp16_accumulation",
           &at::Context::allowFP16AccumulationCuBLAS},
    Switch{"torch.backends.cpu.allow_fp16_reduced_precision_reduction",
           &at::Context::allowFP16ReductionCPU},
};

// Names and present values, always of the same settings in the same order.
std::vector<std::pair<std::string, std::string>> describe_settings() {
  at::Context& context = at::globalContext();
  std::vector<std::pair<std::string, std::string>> described;
  for (const auto& [name, is_on] : kSwitches) {
    described.emplace_back(name, (context.*is_on)() ? "True" : "False");
  }
  const auto add = [&](const char* name, const auto& value) {
    described.emplace_back(name, c10::str(value));
  };
  add("torch.set_default_dtype", c10::get_default_dtype_as_scalartype());
  add("torch.backends.cudnn.benchmark_limit", context.benchmarkLimitCuDNN());
  add("torch.backends.quantized.engine", c10::toString(context.qEngine()));
  add("torch.backends.cuda.preferred_linalg_library",
      at::LinalgBackendToString(context.linalgPreferredBackend()));
  constexpr std::array kBackends{"generic", "cuda", "mkldnn"};
  constexpr std::array kOperators{"all", "conv", "rnn", "matmul"};
  constexpr std::array kPrecisions{"none", "ieee", "tf32", "bf16", "default"};
  const auto name_in = [](const auto& names, auto value) { return names.at(static_cast<std::size_t>(value)); };
  for (const auto& [of, value] : context.*reveal(Precisions())) {
    described.emplace_back(
        c10::str("fp32_precision of ", name_in(kBackends, of.first), ".", name_in(kOperators, of.second)),
        name_in(kPrecisions, value));
  }
  std::string order;
  for (const at::SDPBackend backend : context.sDPPriorityOrder()) {
    order += (order.empty() ? "" : ", ") + std::to_string(static_cast<int>(backend));
  }
  add("the order of torch.nn.attention.sdpa_kernel", order);
  return described;
}

// This thread's marks, which torch has guards for that only set them, for a scope. Assumes that what a guard's
// destructor does, if the guard changed anything, is to take the mark away.
void set_without_tf32(bool on) {
  alignas(at::NoTF32Guard) std::byte place[sizeof(at::NoTF32Guard)];
  auto& guard = *new (place) at::NoTF32Guard;  // not destroyed, it leaves the mark
  if (on) return;
  guard.*reveal(ChangedTf32()) = true;
  guard.~NoTF32Guard();
}

void set_in_backward(bool on) {
  alignas(at::ROCmBackwardPassGuard) std::byte place[sizeof(at::ROCmBackwardPassGuard)];
  auto& guard = *new (place) at::ROCmBackwardPassGuard;
  if (!on) guard.~ROCmBackwardPassGuard();
}

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

int Settings::OfThread::threads_now() {
  return omp_get_max_threads == nullptr ? at::get_num_threads() : omp_get_max_threads();
}

Settings::OfThread Settings::OfThread::now() {
  static const bool is_rocm = at::Context::hasROCM();
  return {.threads = threads_now(),
          .arithmetic = processor_control(),
          .without_tf32 = at::NoTF32Guard::should_disable_tf32(),
          .in_backward = is_rocm && at::ROCmBackwardPassGuard::is_backward_pass()};
}

Settings::Settings()
    : default_dtype_(c10::get_default_dtype_as_scalartype()), thread_(OfThread::now()) {
  const std::span<std::byte> plain = plain_settings();
  context_.assign(plain.begin(), plain.end());
  for (auto& [of, value] : at::globalContext().*reveal(Precisions())) precisions_.emplace_back(&value, value);
  described_ = describe_settings();
}

bool Settings::are_present() const {
  for (const auto& [place, value] : precisions_) {
    if (*place != value) return false;
  }
  return std::memcmp(context_.data(), plain_settings().data(), context_.size()) == 0 &&
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
    if (settings == nullptr || !settings->are_present()) [[unlikely]] settings = latest = &find_present();
    if (changed_here > 0) return *settings;
    if (are_changing(changes)) [[unlikely]] seen_by_others = true;
    if (settings_changes.load() == changes) [[likely]] return *settings;
  }
}

// Only what differs: what another thread sets meanwhile stays.
void Settings::set_for_process() const {
  const std::span<std::byte> plain = plain_settings();
  for (std::size_t i = 0; i < context_.size(); ++i) {
    if (plain[i] != context_[i]) plain[i] = context_[i];
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

// See Note [A thread takes over torch's number of threads]
const Settings& Settings::present_of_begun_thread() {
  static_cast<void>(at::get_num_threads());
  return present();
}

SettingsScope::SettingsScope(const Settings& then, const std::string& op)
    : then_(then), now_(Settings::present_of_begun_thread()), op_(op) {
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

void end_threads_of_loops() {
  constexpr int kHard = 2;  // omp_pause_hard
  if (omp_pause_resource_all != nullptr) static_cast<void>(omp_pause_resource_all(kHard));
}

void settle_settings_after_fork() {
  if (!are_changing(settings_changes) || changed_here > 0) return;
  changed_from->set_for_process();
  ++settings_changes;
  seen_by_others = false;
}

}  // namespace rematfn
