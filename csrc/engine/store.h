// SPDX-License-Identifier: Apache-2.0
//
// store.h: what is done with the bytes of versions. Tensors are one answer, sizes another.

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
  virtual void drop(Version& version) = 0;
  // Whether somebody we do not know of holds the version's storage.
  [[nodiscard]] virtual bool held_elsewhere(const Version& version) = 0;
  // The program dropped `version`, which stays resident on `bytes`. False if these are gone.
  virtual bool retain(Version& version, const Bytes& bytes) = 0;
  // The program dropped `version`. True if its bytes went with the tensor.
  virtual bool forget(Version& version) = 0;
  // Whether the bytes of a resident version are gone without a word of it.
  [[nodiscard]] virtual bool lost(const Version& version) = 0;
  // The bytes of `version` are about to be overwritten: it has a copy of them from now on.
  virtual void copy(Version& version) = 0;
  // They have been: what holds them is another version's now.
  virtual void overwritten(Version& version) = 0;
  // `version`, now a constant, must outlive the program's tensors on it.
  virtual void keep_alive(Version& version) = 0;
  // Throws if the user wants the program to stop.
  virtual void serve_signals() {}
  // So many recorded operations have been looked at, to see what their replay would take.
  virtual void note_lookahead(std::size_t /*operations*/) {}

 protected:
  ~Store() = default;
};

// Where there are no bytes but only numbers of them.
class Sizes : public Store {
 public:
  virtual ~Sizes() = default;
  void drop(Version&) override {}
  bool held_elsewhere(const Version&) override { return false; }
  bool retain(Version&, const Bytes&) override { return true; }
  bool forget(Version& version) override {
    return version.producer || version.place() == Place::kComing;
  }
  bool lost(const Version&) override { return false; }
  void copy(Version&) override {}
  void overwritten(Version&) override {}
  void keep_alive(Version&) override {}
};

}  // namespace rematfn
