// SPDX-License-Identifier: Apache-2.0
//
// invocation.h: a call of an operator as the dispatcher hands it over, boxed on a stack or not.
//
// Note [A reference to an argument is not free]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A tensor that only its Python object refers to keeps that object alive from the moment when
// somebody else does too: the second reference takes the interpreter's lock, and so does dropping it.
// Putting arguments on a stack makes such references, at about a fifth of what the smallest operator
// costs. So the commonest kinds of operators, and those of the commonest networks, come to us
// unboxed (unboxed_kernel.cpp), and what we look at are IValues that borrow the tensors of the caller, who
// holds them until we return.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <vector>

#include "operators/operator_facts.h"

namespace rematfn {

class Invocation {
 public:
  Invocation(const c10::OperatorHandle& op, c10::DispatchKeySet keys, const OperatorFacts& facts)
      : op(op), keys(keys), facts(facts) {}
  virtual ~Invocation() = default;
  Invocation(const Invocation&) = delete;
  Invocation& operator=(const Invocation&) = delete;

  const c10::OperatorHandle& op;
  const c10::DispatchKeySet keys;
  const OperatorFacts& facts;

  // Whose tensors live as long as this does.
  [[nodiscard]] c10::ArrayRef<c10::IValue> arguments() const { return arguments_; }
  // Of the last run.
  [[nodiscard]] c10::ArrayRef<c10::IValue> results() const { return results_; }

  // Goes on to the kernel below ours; if that failed, once more.
  virtual void run_below() = 0;
  // Begins anew, at the top. See Note [Shapes alone]
  virtual void call_again() = 0;
  // `tensor` lives as long as this does.
  void keep(at::Tensor tensor) { kept_.push_back(std::move(tensor)); }

 protected:
  c10::ArrayRef<c10::IValue> arguments_;
  c10::ArrayRef<c10::IValue> results_;

 private:
  std::vector<at::Tensor> kept_;
};

// The thread's keys as call_again() wants them: with the Python dispatcher.
[[nodiscard]] inline c10::impl::LocalDispatchKeySet keys_to_begin_anew() {
  auto keys = c10::impl::tls_local_dispatch_key_set();
  keys.excluded_ = keys.excluded_.remove(c10::DispatchKey::PythonDispatcher);
  return keys;
}

}  // namespace rematfn
