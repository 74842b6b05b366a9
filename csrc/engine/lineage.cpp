// SPDX-License-Identifier: Apache-2.0
#include "engine/lineage.h"

#include <c10/util/Exception.h>

#include "base/thread_local.h"

namespace rematfn {

// See Note [Lineage owns inputs, never outputs]
void destroy(Node* node) {
  REMATFN_THREAD_LOCAL static Node* dead = nullptr;
  REMATFN_THREAD_LOCAL static bool digging = false;
  node->next_dead = dead;
  dead = node;
  if (digging) return;
  digging = true;
  while (dead != nullptr) {
    Node* next = dead;
    dead = next->next_dead;
    delete next;
  }
  digging = false;
}

void Operation::add_input(Ref<Version> version) {
  TORCH_INTERNAL_ASSERT(inputs.size() < inputs.capacity(), "inputs that others refer to would move");
  Input& input = inputs.emplace_back();  // See Note [Records are filled in place]
  input.reader = this;
  input.next = version->readers;
  if (input.next != nullptr) input.next->previous = &input;
  version->readers = &input;
  input.version = std::move(version);
}

// See Note [A replay writes to copies]
std::size_t Operation::replay_bytes() const {
  std::size_t sum = output_bytes + scratch_bytes;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (writes(i) && !may_overwrite(*inputs[i].version)) sum += inputs[i].version->nbytes;
  }
  return sum;
}

void Operation::add_output(Version& version) {
  version.producer = Ref<Operation>(this);
  outputs.push_back(&version);
}

}  // namespace rematfn
