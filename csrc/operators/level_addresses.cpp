// SPDX-License-Identifier: Apache-2.0
//
// level_addresses.cpp: the part of LevelCall for bytes that somebody reads or fills by their address.
#include <torch/csrc/autograd/function.h>

#include <utility>

#include "levels/governed_nodes.h"
#include "operators/level_call.h"
#include "operators/raw_access.h"
#include "tensors/stack_utils.h"

namespace rematfn {

// See Note [What is asked before bytes are read] and Note [Collectives go on after they return]
void LevelCall::keep_arguments() {
  for (const FoundTensor& f : found_) {
    if (f.cell == nullptr || f.written || !f.cell->version->producer) continue;
    keep_contents(domain_, *f.cell->version);
  }
}

void LevelCall::note_addressed() {
  for (const FoundTensor& f : found_) {
    if (f.cell == nullptr) continue;
    domain_.note_addressed(*f.cell->version);
    f.cell->version->note_readers();
  }
}

void LevelCall::note_communicated(bool communicated) {
  for (const FoundTensor& f : found_) {
    if (f.cell == nullptr) continue;
    domain_.note_communicated(*f.cell->version, communicated);
    // What is written has new contents as soon as the operator is done.
    if (communicated && !f.written) f.cell->version->note_readers();
  }
}

// Note [Hooks of a leaf read by address]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Where the whole step is inside of `f`, so is the reducer of DistributedDataParallel. It is a hook,
// in C++, that runs after the node that accumulates a leaf's gradient. Before it copies the gradient
// into a bucket it asks whether the two share an address, which no operator does for it, and finds
// nothing if the gradient was evicted after the node's last operator. We cannot step in between. So what
// is made while such a node runs is kept, if somebody has a hook behind it.
void keep_for_hooks(const torch::autograd::Node* node, c10::ArrayRef<c10::IValue> results) {
  if (node == nullptr || node->post_hooks().empty() || node->sequence_nr() != kAccumulator) [[likely]] return;
  keep_bytes(tensors_in(results), "a hook of a leaf", /*addressed=*/true);
}

// See Note [Uninitialised memory is kept] and Note [Arrays are seldom written]
void LevelCall::prepare() {
  for (const FoundTensor& f : found_) {
    if (f.cell == nullptr || (f.written && facts_.overwrites)) continue;
    TensorVersion& version = *f.cell->version;
    const bool filled = std::exchange(version.raw, false);
    if (filled || version.was_written_by_array()) [[unlikely]] keep_contents(domain_, version);
  }
}

}  // namespace rematfn
