// SPDX-License-Identifier: Apache-2.0
//
// find_level.h: which level an operator is under, and which tensors it is called on.

#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>

#include "levels/level.h"
#include "operators/invocation.h"

namespace torch::autograd {
struct Node;
}

namespace rematfn {

// A tensor among the arguments; the invocation holds it.
struct FoundTensor {
  c10::TensorImpl* tensor = nullptr;
  const c10::StorageImpl* storage = nullptr;
  Cell* cell = nullptr;  // null: a tensor from outside
  std::int32_t index = -1;
  std::uint16_t position = 0;
  bool written = false;
};

using FoundTensors = c10::SmallVector<FoundTensor, 6>;

// Note [Shapes alone]
// ~~~~~~~~~~~~~~~~~~~~
// Operators on meta tensors have no bytes to count. A fake tensor is one while it is computed with,
// and its sizes may be symbols: to ask for a number would make them one, and whoever traces the
// program would get a graph for these sizes alone. So such an operator is under no level. It is
// called again, not redispatched: the Python dispatcher, where the shape functions of symbols are,
// stands above us and has to have its turn.
enum class ArgumentKind {
  kPlain,
  kOpaque,    // some argument is no plain tensor or plain value
  // Tensors without bytes. There may be level tensors as well: `find_level` then makes it kOpaque.
  kAbstract,
};

void add(FoundTensors& found, c10::TensorImpl& tensor, std::size_t position, int index);

// The tensors with bytes of their own among the arguments, the parts of others, and what the rest is like.
[[nodiscard]] ArgumentKind find_tensors(Invocation& invocation, FoundTensors& found);

// The domain that an operator belongs to: the one of this thread's levels, which is alive while
// they run, else that of its level tensors, or none.
struct FoundDomain {
  const torch::autograd::Node* node = nullptr;  // that a backward runs on this thread
  Level* level = nullptr;  // of this thread, or of the node that runs
  Domain* domain = nullptr;
  std::shared_ptr<Domain> alive;
};
// Tensors of any other domain are sealed: they have come here from elsewhere. No domain's lock is
// held.
[[nodiscard]] FoundDomain find_domain(const FoundTensors& found);

// The level that the operator is under: the innermost of its tensors' and of the thread's.
// Tensors of levels that nobody runs are sealed on the way, see
// Note [Why the backward finds its level again]. The lock of the operator's domain is held, if any.
// With a level tensor among them, arguments are not abstract.
[[nodiscard]] Level* find_level(Invocation& invocation, const FoundDomain& domain, FoundTensors& found,
                                ArgumentKind& kind);
// The same where all arguments are plain.
[[nodiscard]] Level* innermost_level(const FoundDomain& domain, FoundTensors& found);

// How often the operator may have moved the version counters of tensors on `storage` by now.
[[nodiscard]] std::uint32_t bumps_so_far(const Invocation& invocation, const FoundTensors& found,
                                         const c10::StorageImpl& storage);

// Notes which of the tensors found among its arguments the operator overwrites.
void find_writes(const Invocation& invocation, FoundTensors& found);

}  // namespace rematfn
