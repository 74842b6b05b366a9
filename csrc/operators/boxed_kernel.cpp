// SPDX-License-Identifier: Apache-2.0
#include "operators/boxed_kernel.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "operators/call.h"
#include "operators/kernels_above.h"
#include "operators/level_call.h"
#include "operators/write_watch.h"

namespace rematfn {
namespace {

class BoxedInvocation final : public Invocation {
 public:
  // `instead`, if given, is run in the place of the kernel below: see Note [Kernels above a level].
  BoxedInvocation(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  const OperatorFacts& facts, torch::jit::Stack& stack,
                  const c10::SafeKernelFunction* instead)
      : Invocation(op, keys, facts),
        stack_(stack),
        instead_(instead),
        base_(stack.size() - op.schema().arguments().size()) {
    arguments_ = c10::ArrayRef<c10::IValue>(stack).slice(base_);
  }

  void run_below() override {
    if (held_.empty()) {
      held_.append(arguments_.begin(), arguments_.end());
      arguments_ = held_;
    } else {
      stack_.erase(stack_.begin() + static_cast<std::ptrdiff_t>(base_), stack_.end());
      stack_.insert(stack_.end(), held_.begin(), held_.end());
    }
    if (instead_ != nullptr) {
      instead_->callBoxed(op, keys, &stack_);
    } else {
      rematfn::run_below(op, keys, facts.selects_backend, &stack_);
    }
    results_ = c10::ArrayRef<c10::IValue>(stack_).slice(base_);
  }

  void call_again() override {
    if (instead_ != nullptr) return instead_->callBoxed(op, keys, &stack_);
    const c10::impl::ForceDispatchKeyGuard anew(keys_to_begin_anew());
    op.callBoxed(&stack_);
  }

 private:
  torch::jit::Stack& stack_;
  const c10::SafeKernelFunction* const instead_;
  const std::size_t base_;  // what lies below the arguments
  c10::SmallVector<c10::IValue, 8> held_;  // the arguments, once the kernel took them off the stack
};

void level_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
  govern(op, keys, stack);
}

// ---- registration -----------------------------------------------------------------------------

struct Registrations {
  std::mutex mutex;
  std::vector<c10::OperatorName> pending;  // defined, not looked at yet
  std::atomic<bool> any_pending{false};
  std::vector<c10::RegistrationHandleRAII> handles;
};

Registrations& registrations = *new Registrations;  // the dispatcher outlives static objects

// The dispatcher holds its lock while it calls back, so new operators are queued here and
// registered when the next operator comes by or the next level is pushed.
class Listener final : public c10::OpRegistrationListener {
 public:
  void onOperatorRegistered(const c10::OperatorHandle& op) override {
    const std::lock_guard guard(registrations.mutex);
    registrations.pending.push_back(op.operator_name());
    registrations.any_pending = true;
  }
  void onOperatorDeregistered(const c10::OperatorHandle&) override { end_operator_generation(); }
};

constexpr std::array kBackends{c10::DispatchKey::CPU,  c10::DispatchKey::CUDA,
                               c10::DispatchKey::HIP,  c10::DispatchKey::XPU,
                               c10::DispatchKey::MPS,  c10::DispatchKey::PrivateUse1};

// See Note [Which key we borrow]: a default kernel beats a fallback on our key. An operator that
// decomposes anyway is left to do so, unless some backend has a kernel for it nevertheless: the
// decomposition would give other bits than that kernel (silu_backward).
bool needs_kernel_of_its_own(const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  const auto has = [&](DispatchKey key) { return op.hasKernelForDispatchKey(key); };
  if (has(kLevelKey)) return false;
  if (has(DispatchKey::CompositeImplicitAutograd)) {
    return std::any_of(kBackends.begin(), kBackends.end(), has);
  }
  return has(DispatchKey::CompositeExplicitAutograd) ||
         has(DispatchKey::CompositeExplicitAutogradNonFunctional);
}

void register_operators(const std::vector<c10::OperatorName>& names) {
  static std::mutex one_at_a_time;
  const std::lock_guard registering(one_at_a_time);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : names) {
    const auto op = dispatcher.findSchema(name);
    if (!op.has_value()) continue;
    if (!op->hasKernelForAnyDispatchKey(c10::DispatchKeySet(c10::DispatchKeySet::FULL)) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
      // Defined but not implemented yet: look again when the next one is defined or level pushed.
      const std::lock_guard guard(registrations.mutex);
      registrations.pending.push_back(name);
      continue;
    }
    watch_writes(*op);
    const bool decomposes =
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    const bool needed = needs_kernel_of_its_own(*op);
    if (decomposes && !needed) continue;
    auto kernel = unboxed_kernel_for(*op);
    if (!kernel && !needed) continue;
    if (decomposes) {
      // AutogradOther stands for other backends, and could not choose between them and ours.
      put_around(*op, c10::DispatchKey::AutogradOther, &run_theirs);
    }
    if (!kernel) kernel = c10::KernelFunction::makeFromBoxedFunction<&level_kernel>();
    register_kernel(name, kLevelKey, std::move(*kernel));
  }
}

}  // namespace

void govern(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack,
            const c10::SafeKernelFunction* instead) {
  const std::shared_ptr<const OperatorFacts> facts = facts_of(op);
  BoxedInvocation invocation(op, keys, *facts, *stack, instead);
  govern(invocation);
}

void govern(Invocation& invocation) {
  const BelowLevels below;
  if (registrations.any_pending.load(std::memory_order_relaxed)) [[unlikely]] register_new_operators();
  FoundTensors found;
  ArgumentKind kind = find_tensors(invocation, found);
  find_writes(invocation, found);
  // See Note [Who waits for other ranks holds no lock]
  if (invocation.facts.waits_for_ranks && kind != ArgumentKind::kAbstract && !DomainLock::is_held()) [[unlikely]] {
    invocation.run_below();
    if (!invocation.facts.ends_work) return;
  }
  {
    // See Note [Another thread may seal a tensor]
    const FoundDomain domain = find_domain(found);
    // See Note [What is stored away outlives what it was made of]
    if (domain.domain != nullptr && !DomainLock::is_held()) [[likely]] {
      save_for_readers(invocation, found, domain.domain);
    }
    std::optional<DomainLock> lock;
    if (domain.domain != nullptr) [[likely]] lock.emplace(*domain.domain);
    if (Level* level = find_level(invocation, domain, found, kind)) [[likely]] {
      LevelCall(invocation, *level, found, kind == ArgumentKind::kOpaque, domain.node).run();
      return;
    }
  }
  if (kind == ArgumentKind::kAbstract) {
    invocation.call_again();
    return;
  }
  save_for_readers(invocation, found);
  invocation.run_below();
}

at::Tensor govern_view(const at::Tensor& base, c10::function_ref<at::Tensor()> run_below) {
  const BelowLevels below;
  if (registrations.any_pending.load(std::memory_order_relaxed)) [[unlikely]] register_new_operators();
  FoundTensors found;
  add(found, *base.unsafeGetTensorImpl(), /*position=*/0, /*index=*/-1);
  const FoundDomain domain = find_domain(found);
  std::optional<DomainLock> lock;
  if (domain.domain != nullptr) [[likely]] lock.emplace(*domain.domain);
  Level* level = innermost_level(domain, found);
  if (level == nullptr) [[unlikely]] {
    lock.reset();
    return run_below();
  }
  note_operator(*level, found);
  if (!base.is_cpu()) level->tensor_domain().streams.enter(base.device());
  at::Tensor view = run_below();
  put_handle_on(*view.unsafeGetTensorImpl(), found);
  if (domain.node != nullptr) keep_for_hooks(domain.node, {c10::IValue(view)});
  return view;
}

void register_kernels() {
  auto& dispatcher = c10::Dispatcher::singleton();
  TORCH_CHECK(!dispatcher.hasBackendFallbackForDispatchKey(kLevelKey),
              "rematfn needs the dispatch key ", c10::toString(kLevelKey),
              ", which has a fallback already: of another library in this process (torchcsprng has one), with "
              "which rematfn cannot be used together, or of rematfn itself, imported a second time.");
  registrations.handles.push_back(dispatcher.registerFallback(
      kLevelKey, c10::KernelFunction::makeFromBoxedFunction<&level_kernel>(), "rematfn"));
  register_operators(dispatcher.getAllOpNames());
  register_kernels_above();
  registrations.handles.push_back(
      dispatcher.addRegistrationListener(std::make_unique<Listener>()));
  // The listener is told of all operators there are, which we have just seen to.
  const std::lock_guard guard(registrations.mutex);
  registrations.pending.clear();
  registrations.any_pending = false;
}

void register_new_operators() {
  std::vector<c10::OperatorName> names;
  {
    const std::lock_guard guard(registrations.mutex);
    names.swap(registrations.pending);
    registrations.any_pending = false;
  }
  register_operators(names);
}

void register_kernel(const c10::OperatorName& name, c10::DispatchKey key,
                     c10::KernelFunction kernel) {
  registrations.handles.push_back(c10::Dispatcher::singleton().registerImpl(
      name, key, std::move(kernel), std::nullopt, nullptr, "rematfn"));
}

}  // namespace rematfn
