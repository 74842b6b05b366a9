// SPDX-License-Identifier: Apache-2.0
#include "tensors/rng.h"

#include <ATen/CPUGeneratorImpl.h>

#include <optional>

#include "base/interpreter.h"
#include "engine/domain.h"
#include "engine/sharing.h"

namespace rematfn {
namespace {

class CpuState final : public RandomState {
 public:
  explicit CpuState(const at::Generator& generator) : RandomState(generator) {
    auto* impl = generator.get<at::CPUGeneratorImpl>();
    engine_ = impl->engine();
    next_float_ = impl->next_float_normal_sample();
    next_double_ = impl->next_double_normal_sample();
  }

  void restore() const override {
    auto generator = generator_;
    const std::lock_guard guard(generator.mutex());
    auto* impl = generator.get<at::CPUGeneratorImpl>();
    impl->set_engine(engine_);
    impl->set_next_float_normal_sample(next_float_);
    impl->set_next_double_normal_sample(next_double_);
  }

 private:
  at::mt19937 engine_;
  std::optional<float> next_float_;
  std::optional<double> next_double_;
};

class AnyState final : public RandomState {
 public:
  explicit AnyState(const at::Generator& generator)
      : RandomState(generator), state_(generator.get_state()) {}

  void restore() const override {
    auto generator = generator_;
    const std::lock_guard guard(generator.mutex());
    generator.set_state(state_);
  }

 private:
  at::Tensor state_;
};

}  // namespace

std::shared_ptr<const RandomState> RandomState::of(const at::Generator& generator) {
  auto held = generator;
  const std::lock_guard guard(held.mutex());
  if (held.device().is_cpu()) return std::make_shared<CpuState>(held);
  return std::make_shared<AnyState>(held);
}

namespace {

// On the heap, since a forked child may have to do without the one it inherits.
std::recursive_mutex*& turn_mutex() {
  static auto* instance = new std::recursive_mutex;
  return instance;
}

}  // namespace

// See Note [Random operators take turns]
// See Note [Whoever needs room may take it]
RandomTurn::RandomTurn(Domain& domain) : mutex_(*turn_mutex()) {
  if (domain.sharing.empty()) {
    lock_without_interpreter(mutex_);
  } else {
    while (!mutex_.try_lock()) lend(domain);
  }
}

RandomTurn::~RandomTurn() { mutex_.unlock(); }

void forget_turns_after_fork() {
  if (turn_mutex()->try_lock()) {
    turn_mutex()->unlock();
  } else {
    turn_mutex() = new std::recursive_mutex;
  }
}

RandomScope::RandomScope(const std::shared_ptr<const RandomState>& state) {
  if (!state) return;
  saved_ = state->present();
  state->restore();
}

RandomScope::~RandomScope() {
  if (saved_) saved_->restore();
}

}  // namespace rematfn
