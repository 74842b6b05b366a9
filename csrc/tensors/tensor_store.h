// SPDX-License-Identifier: Apache-2.0
//
// tensor_store.h: what is done with the bytes of tensors.
//
// Note [An evicted storage knows its cell]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A tensor may be made over a level tensor's storage without us: `set_` takes a Storage, and so do
// deepcopy, pickle and share_memory_ beneath. It has no handle, and if the storage is evicted, no
// bytes. So what an evicted storage holds in the place of its bytes is a reference to its cell, and
// the first operator that finds such a tensor puts the handle on it.

#pragma once

#include "engine/store.h"
#include "tensors/level_tensor.h"

namespace rematfn {

class TensorStore final : public Store {
 public:
  void drop(Version& version) override;
  bool held_elsewhere(const Version& version) override;
  // Of what was leaving: somebody holds its storage now, and may have its address.
  bool taken_meanwhile(const Version& version) { return !lost(version) && held_elsewhere(version); }
  bool retain(Version& version, const Bytes& bytes) override;
  bool forget(Version& version) override;
  bool lost(const Version& version) override;
  void copy(Version& version) override;
  void overwritten(Version& version) override;
  void keep_alive(Version& version) override;
  void serve_signals() override;
};

extern constinit TensorStore tensor_store;

// The level's own bytes: puts those of `from` where the program's tensors look for them.
void refill(TensorVersion& version, c10::Storage from);

}  // namespace rematfn
