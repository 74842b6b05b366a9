// SPDX-License-Identifier: Apache-2.0
#include "tensors/rng.h"

#include <ATen/CPUGeneratorImpl.h>

#include <pthread.h>

#include "base/interpreter.h"
#include "engine/domain.h"
#include "engine/sharing.h"

namespace rematfn {
namespace {

// A forked child has another: nobody else has a turn there.
std::recursive_mutex*& turn_mutex() {
  static auto* instance = new std::recursive_mutex;
  return instance;
}
const int turns_at_fork = pthread_atfork(nullptr, nullptr, [] { turn_mutex() = new std::recursive_mutex; });

}  // namespace

RandomState::RandomState(at::Generator generator) : generator_(std::move(generator)) {
  const std::lock_guard guard(generator_.mutex());
  if (generator_.device().is_cpu()) {
    copy_ = generator_.clone();
  } else {
    state_ = generator_.get_state();
  }
}

void RandomState::restore() const {
  at::Generator generator = generator_;
  const std::lock_guard guard(generator.mutex());
  if (!copy_.defined()) return generator.set_state(state_);
  auto* to = generator.get<at::CPUGeneratorImpl>();
  auto* from = copy_.get<at::CPUGeneratorImpl>();
  to->set_engine(from->engine());
  to->set_next_float_normal_sample(from->next_float_normal_sample());
  to->set_next_double_normal_sample(from->next_double_normal_sample());
}

// See Note [Random operators take turns]
// See Note [Whoever needs room may take it]
std::unique_lock<std::recursive_mutex> take_random_turn(Domain& domain) {
  std::unique_lock turn(*turn_mutex(), std::defer_lock);
  if (domain.sharing.empty()) {
    lock_without_interpreter(turn);
  } else {
    while (!turn.try_lock()) lend(domain);
  }
  return turn;
}

}  // namespace rematfn
