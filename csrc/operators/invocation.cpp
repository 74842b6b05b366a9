// SPDX-License-Identifier: Apache-2.0
#include "operators/invocation.h"

#include "operators/call.h"

namespace rematfn {

c10::impl::LocalDispatchKeySet keys_to_begin_anew() {
  auto keys = c10::impl::tls_local_dispatch_key_set();
  keys.excluded_ = keys.excluded_.remove(c10::DispatchKey::PythonDispatcher);
  return keys;
}

BoxedInvocation::BoxedInvocation(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                 const OperatorFacts& facts, torch::jit::Stack& stack,
                                 const c10::SafeKernelFunction* instead)
    : Invocation(op, keys, facts),
      stack_(stack),
      instead_(instead),
      base_(stack.size() - op.schema().arguments().size()) {
  arguments_ = c10::ArrayRef<c10::IValue>(stack).slice(base_);
}

void BoxedInvocation::run_below() {
  if (held_.empty()) {
    held_.append(arguments_.begin(), arguments_.end());
    arguments_ = held_;
  } else {
    stack_.erase(stack_.begin() + static_cast<std::ptrdiff_t>(base_), stack_.end());
    stack_.insert(stack_.end(), held_.begin(), held_.end());
  }
  rematfn::run_below(op, keys, facts.selects_backend, &stack_, instead_);
  results_ = c10::ArrayRef<c10::IValue>(stack_).slice(base_);
}

void BoxedInvocation::call_again() {
  if (instead_ != nullptr) return instead_->callBoxed(op, keys, &stack_);
  const c10::impl::ForceDispatchKeyGuard anew(keys_to_begin_anew());
  op.callBoxed(&stack_);
}

}  // namespace rematfn
