// SPDX-License-Identifier: Apache-2.0
//
// torch_layout.h: what we rely on in torch's classes that no interface of theirs promises.
//
// Each entry says what it assumes and what would tell if that were no longer so. What differs between
// versions of torch is in torch_compat.h, the dispatch key that we borrow in dispatch_key.h, and the
// header that torch includes but does not ship in third_party_shims/.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <atomic>
#include <cstddef>
#include <cstring>

namespace rematfn {

// TensorImpl::key_set_, which is protected. A pointer to the member, named through a derived class, is
// the legal way in. Assumes that the key set is one word that can be read and written whole: see Note
// [Another thread may seal a tensor]. Checked here; another name or type does not compile.
struct KeySet : c10::TensorImpl {
  static std::atomic_ref<c10::DispatchKeySet> of(const c10::TensorImpl& tensor) {
    return std::atomic_ref(const_cast<c10::TensorImpl&>(tensor).*(&KeySet::key_set_));
  }
};
static_assert(std::atomic_ref<c10::DispatchKeySet>::is_always_lock_free);

// The address of a version counter, by which it is known. torch compares no counters, nor gives an
// address. Assumes that a VariableVersion holds one pointer and nothing else; its size is checked here.
inline const void* address_of(const c10::VariableVersion& counter) {
  const void* address = nullptr;
  static_assert(sizeof(counter) == sizeof(address));
  std::memcpy(&address, &counter, sizeof(address));
  return address;
}

// An IValue that refers to the tensor without counting as a reference; it must never be destroyed.
// Assumes that an IValue takes over a tensor's pointer as it is, and that nobody who is lent one asks
// how many references there are. Were it otherwise, reference counts would go wrong in any test.
// See Note [A reference to an argument is not free]
inline c10::IValue borrow(const at::Tensor& tensor) {
  using Pointer = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  return at::Tensor(Pointer::reclaim(tensor.unsafeGetTensorImpl()));
}

// How many hold the storage, but for the Python object that torch keeps for it once somebody has asked a
// question of `tensor.untyped_storage()`: that has a reference to the storage, and nobody one to it but
// torch. Whoever asks again is given that object, and reads by methods that tell us first: Note [A storage
// that is read comes back]. Assumes that the object's one reference is then the storage's own. Were torch
// to keep more of them, what was asked about would stay: tests/interop/test_storage_questions.py fails.
inline std::size_t holders_of(const c10::StorageImpl& storage) {
  auto* counted = const_cast<c10::StorageImpl*>(&storage);  // the getter is not const
  const std::size_t references = c10::raw::intrusive_ptr::use_count(counted);
  return references - (references > 1 && storage.pyobj_slot()->has_unique_reference() ? 1 : 0);
}

// A private or protected member, under a name of ours, written in namespace rematfn. A template that is
// instantiated by name may name what is private: the legal way in. Another name does not compile.
template <class Name, auto member>
struct Reveal {
  friend constexpr auto reveal(Name) { return member; }
};
#define REMATFN_REVEAL(Name, member)     \
  struct Name {                          \
    friend constexpr auto reveal(Name);  \
  };                                     \
  template struct Reveal<Name, &member>;

REMATFN_REVEAL(DefinitionOf, c10::OperatorHandle::operatorDef_)
REMATFN_REVEAL(SignatureOf, c10::impl::OperatorEntry::cpp_signature_)
REMATFN_REVEAL(SymbolicSignatureOf, c10::impl::OperatorEntry::sym_cpp_signature_)

// Whether the dispatcher passes an operator's arguments and results as a function of this type does.
template <class Function>
bool has_signature(const c10::OperatorHandle& op) {
  const auto& entry = (op.*reveal(DefinitionOf()))->op;
  const auto& symbolic = entry.*reveal(SymbolicSignatureOf());
  const auto& known = symbolic ? symbolic : entry.*reveal(SignatureOf());
  return known && known->signature == c10::impl::CppSignature::make<Function>();
}

}  // namespace rematfn
