// SPDX-License-Identifier: Apache-2.0
#include "levels/interpreter_end.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>

#include <memory>

namespace rematfn {
namespace {

// Engine::init_local_ready_queue() gives this thread another queue, and is protected. A pointer to the member,
// named through a derived class, is the legal way in; another name or type does not compile.
struct Engine : torch::autograd::Engine {
  static constexpr auto queue_setter() { return &Engine::init_local_ready_queue; }
};

}  // namespace

void empty_ready_queue() {
  if (torch::autograd::get_current_node()) return;  // somebody has called the exit handlers in a backward
  auto& engine = torch::autograd::Engine::get_default_engine();
  (engine.*Engine::queue_setter())(std::make_shared<torch::autograd::ReadyQueue>());
}

}  // namespace rematfn
