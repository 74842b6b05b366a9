// SPDX-License-Identifier: Apache-2.0
//
// store.h: what is done with the bytes of versions. Tensors have their own answers. What stands here is for where there
// are no bytes, but only numbers of them.

#pragma once

#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>

#include "engine/table.h"

namespace rematfn {

class Store {
 public:
  using Bytes = c10::intrusive_ptr<c10::intrusive_ptr_target>;
  using HoldBytes = c10::function_ref<Bytes()>;
  static Bytes no_bytes() { return {}; }

  // Frees the bytes of an evictable version.
  virtual void drop(Version& /*version*/) {}
  // Whether somebody we do not know of holds the version's storage.
  [[nodiscard]] virtual bool held_elsewhere(const Version& /*version*/) { return false; }
  // The program dropped `version`, which stays resident on `bytes`. False if these are gone.
  virtual bool retain(Version& /*version*/, const Bytes& /*bytes*/) { return true; }
  // The program dropped `version`. True if its bytes went with the tensor.
  virtual bool forget(Version& version) { return version.producer || version.place() == Place::kComing; }
  // Whether the bytes of a resident version are gone without a word of it.
  [[nodiscard]] virtual bool lost(const Version& /*version*/) { return false; }
  // The bytes of `version` are about to be overwritten: it has a copy of them from now on.
  virtual void copy(Version& /*version*/) {}
  // They have been: what holds them is another version's now.
  virtual void overwritten(Version& /*version*/) {}
  // `version`, now a constant, must outlive the program's tensors on it.
  virtual void keep_alive(Version& /*version*/) {}
  // Throws if the user wants the program to stop.
  virtual void serve_signals() {}
  // So many recorded operations have been looked at, to see what their replay would take.
  virtual void note_lookahead(std::size_t /*operations*/) {}

 protected:
  ~Store() = default;
};

}  // namespace rematfn
