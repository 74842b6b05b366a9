// SPDX-License-Identifier: Apache-2.0
#include "operators/write_watch.h"

#include "levels/level.h"
#include "levels/refusals.h"
#include "operators/boxed_kernel.h"
#include "operators/kernels_above.h"
#include "operators/raw_access.h"
#include "tensors/layers.h"
#include "tensors/stack_utils.h"

namespace rematfn {
namespace {

// Keeps a copy of what recorded operations have read, or throws NoRoom.
void save_in(TensorDomain& domain, const c10::StorageImpl& storage, const OperatorFacts& facts,
             std::uint32_t bumps) {
  if (facts.resizes_storage) return domain.outside.note_resize(storage);
  TensorVersion* version = domain.outside.known(storage, bumps);
  if (version != nullptr && version->readers != nullptr) {
    const Ref<TensorVersion> stays(version);
    const Ref<Table> level = version->readers->reader->table;
    if (!domain.free_of_readers(*version, *level)) {
      domain.snapshot(*version, *level);
      return;
    }
    version->value = kNoValue;
  }
  domain.outside.note_write(storage);
}

// Or goes without.
void save_or_forget_in(TensorDomain& domain, const c10::StorageImpl& storage,
                       const OperatorFacts& facts, std::uint32_t bumps) {
  try {
    save_in(domain, storage, facts, bumps);
  } catch (const NoRoom&) {
    domain.outside.forget(storage, /*for_want_of_room=*/true);
  }
}

// The domain of this thread's levels, if they see its operators themselves.
const Domain* domain_that_sees() {
  const Level* level = current_level();
  return level != nullptr && is_intercepting() ? level->domain.get() : nullptr;
}

void save_what_is_written(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  if (DomainLock::is_held()) return;  // it runs within an operator that has been seen
  const auto facts = facts_of(op);
  const std::size_t first = stack.size() - op.schema().arguments().size();
  const auto visit = [&](TensorDomain& domain) {
    const auto save = [&](std::uint8_t position) {
      for_each_nested_tensor(stack[first + position], [&](const at::Tensor& tensor) {
        for_each_innermost(tensor, [&](const at::Tensor& inner) {
          const c10::TensorImpl& impl = *inner.unsafeGetTensorImpl();
          if (!is_plain(impl)) return;
          save_or_forget_in(domain, *impl.unsafe_storage().unsafeGetStorageImpl(), *facts, /*bumps=*/0);
        });
      });
    };
    for (const std::uint8_t position : facts->writes) save(position);
    for (const std::uint8_t position : facts->training_writes) save(position);
  };
  for_each_live_domain(visit, domain_that_sees());
}

// See Note [Writes that nobody counts]
void watch_and_go_on(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack) {
  save_what_is_written(op, *stack);
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

// The same, around a kernel of autograd's that goes straight to the backends.
void watch_and_run(const c10::SafeKernelFunction& theirs, const c10::OperatorHandle& op,
                   c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  save_what_is_written(op, *stack);
  theirs.callBoxed(op, keys, stack);
}

}  // namespace

void watch_writes(const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  if (!facts_of(op)->writes_uncounted) return;
  register_kernel(op.operator_name(), DispatchKey::ADInplaceOrView,
                  c10::KernelFunction::makeFromBoxedFunction<&watch_and_go_on>());
  if (op.schema().is_mutable() || !op.hasKernelForDispatchKey(DispatchKey::Autograd)) return;
  for (const DispatchKey key : {DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA}) {
    put_around(op, key, &watch_and_run);
  }
}

void save_for_readers(const Invocation& invocation, const FoundTensors& found, const Domain* ours) {
  for (const FoundTensor& f : found) {
    if (!f.written || (ours != nullptr && has_level_key(*f.tensor))) [[likely]] continue;
    const std::uint32_t bumps = bumps_so_far(invocation, found, *f.storage);
    for_each_live_domain([&](TensorDomain& domain) {
      if (ours != nullptr) return save_or_forget_in(domain, *f.storage, invocation.facts, bumps);
      try {
        save_in(domain, *f.storage, invocation.facts, bumps);
      } catch (const NoRoom& why) {
        raise_budget_error(why, "`" + invocation.op.schema().name() + "`");
      }
    }, ours);
  }
}

void note_move(const c10::Storage& storage) {
  for_each_live_domain([&](TensorDomain& domain) {
    domain.outside.note_resize(*storage.unsafeGetStorageImpl());
    const Cell* cell = domain.cell_on(*storage.unsafeGetStorageImpl());
    if (cell != nullptr) cell->version->note_array();
  });
}

// See Note [Resizes are operators]
bool resize_if_known(const c10::Storage& storage, std::int64_t nbytes) {
  at::Tensor bytes;
  bool known = false;
  const Domain* seeing = domain_that_sees();
  for_each_live_domain([&](TensorDomain& domain) {
    const c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
    known |= domain.outside.has_read(impl);
    if (&domain != seeing) domain.outside.note_resize(impl);
    Cell* cell = bytes.defined() ? nullptr : domain.cell_on(impl);
    if (cell != nullptr) bytes = bytes_of(storage, *cell);
  });
  if (!known && !bytes.defined()) return false;
  if (!bytes.defined()) bytes = bytes_of(storage);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("inductor::resize_storage_bytes_", "")
                             .typed<void(const at::Tensor&, c10::SymInt)>();
  op.call(bytes, nbytes);
  return true;
}

}  // namespace rematfn
