// SPDX-License-Identifier: Apache-2.0
#include "tensors/rng.h"

#include <ATen/CPUGeneratorImpl.h>

#include <pthread.h>

#include <cstring>

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
    auto* cpu = generator_.get<at::CPUGeneratorImpl>();
    of_cpu_ = OfCpu{cpu->engine(), cpu->next_float_normal_sample(), cpu->next_double_normal_sample()};
  } else {
    state_ = generator_.get_state();
  }
}

void RandomState::restore() const {
  at::Generator generator = generator_;
  const std::lock_guard guard(generator.mutex());
  if (!of_cpu_) return generator.set_state(state_);
  auto* cpu = generator.get<at::CPUGeneratorImpl>();
  cpu->set_engine(of_cpu_->engine);
  cpu->set_next_float_normal_sample(of_cpu_->next_float);
  cpu->set_next_double_normal_sample(of_cpu_->next_double);
}

bool RandomState::has_moved() const {
  const RandomState now = present();
  if (!of_cpu_) {
    return now.state_.nbytes() != state_.nbytes() ||
           std::memcmp(now.state_.data_ptr(), state_.data_ptr(), state_.nbytes()) != 0;
  }
  const at::mt19937_data_pod then = of_cpu_->engine.data();
  const at::mt19937_data_pod at_present = now.of_cpu_->engine.data();
  return at_present.left_ != then.left_ || at_present.state_ != then.state_ ||
         now.of_cpu_->next_float != of_cpu_->next_float || now.of_cpu_->next_double != of_cpu_->next_double;
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
