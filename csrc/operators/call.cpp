// SPDX-License-Identifier: Apache-2.0
#include "operators/call.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/util/ScopeExit.h>

#include <optional>

#include "base/errors.h"
#include "levels/device_memory.h"
#include "levels/meter.h"
#include "levels/refusals.h"
#include "tensors/stack_utils.h"
#include "tensors/tensor_store.h"
#include "tensors/torch_compat.h"

namespace rematfn {

void Call::take_input(Ref<Version> version) {
  if (!version->producer) tensor_store.keep_alive(*version);
  add_input(std::move(version));
}

void Call::add_result(Version& version, OutputPlace place, const at::Tensor* result) {
  add_output(version);
  places.push_back(place);
  if (result == nullptr) [[likely]] return;
  if (!fingerprints) fingerprints = std::make_unique<std::vector<std::optional<std::uint64_t>>>();
  fingerprints->resize(places.size());
  fingerprints->back() = fingerprint_of(*result);
}

void Call::verify(std::size_t output, const at::Tensor& again) const {
  if (!fingerprints || output >= fingerprints->size()) return;
  const std::optional<std::uint64_t> first = (*fingerprints)[output];
  check_replay(!first || fingerprint_of(again) == *first,
               "`" + c10::toString(call_template->op.operator_name()) +
                   "` gave other bits on its second run than on its first. Make its kernel "
                   "deterministic; or if it draws random numbers, take them from torch's "
                   "generators and tag it nondeterministic_seeded; or have its results kept by the tag "
                   "nondeterministic_bitwise");
}

const TensorVersion& Call::input(std::size_t i) const {
  return static_cast<const TensorVersion&>(*inputs[i].version);
}

std::size_t Call::bytes_aside() const {
  std::size_t sum = 0;
  for (std::size_t i = inputs.size(); i < call_template->tensors.size(); ++i) {
    sum += call_template->tensors[i].storage_bytes;
  }
  return sum;
}

// What was recomputed for this call alone.
bool Call::may_overwrite(const Version& version) const {
  return version.may_be_overwritten() && tensor_version(version).storage;
}

// See Note [A replay writes to copies]
std::vector<c10::Storage> Call::prepare_writes(TensorDomain& domain, bool& consumes) {
  std::vector<c10::Storage> own(call_template->tensors.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!writes(i) || own[i]) continue;
    auto& version = static_cast<TensorVersion&>(*inputs[i].version);
    c10::Storage storage;
    if (may_overwrite(version)) {
      consumes = true;
      storage = version.storage;
      version.storage = c10::Storage();
      domain.note_gone(version);
    } else {
      storage = bytes_of(version.current_storage()).clone().storage();
    }
    // The call may have been given the same storage more than once: x.add_(x).
    for (std::size_t k = 0; k < inputs.size(); ++k) {
      if (inputs[k].version.get() == &version) own[k] = storage;
    }
  }
  for (std::size_t i = inputs.size(); i < own.size(); ++i) {  // See Note [Statistics are written aside]
    const auto nbytes = static_cast<std::int64_t>(call_template->tensors[i].storage_bytes);
    own[i] = at::zeros({nbytes}, at::TensorOptions(input(0).current_storage().device()).dtype(at::kByte)).storage();
  }
  return own;
}

void Call::check_reading(const TensorVersion& version, std::size_t i) const {
  if (version.readings->agrees(order, i, version.current_storage(), call_template->view(i))) return;
  check_replay(false,
               "an argument of `" + call_template->op.schema().name() +
                   "` was written by its address (`data_ptr()`, NumPy, DLPack, shared memory) after it was read, and "
                   "no operator told of it. Write with an operator, or to a clone");
}

// See Note [Evidence of contents]
void Call::check_inputs(TensorDomain& domain) const {
  if (call_template->reads_shapes_only) return;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    auto& version = static_cast<TensorVersion&>(*inputs[i].version);
    if (version.readings) check_reading(version, i);
    if (version.outside == nullptr) continue;
    const char* change = domain.outside.change_of(version, call_template->view(i));
    if (change == nullptr) continue;
    check_replay(false, "an argument of `" + call_template->op.schema().name() +
                            "` that the program holds outside of the level " + change);
  }
}

// See Note [A captured call keeps to itself]
void Call::check_sides(const TensorDomain& domain) const {
  if (!domain.streams.any()) return;
  for (const Version* output : outputs) {
    if (output != nullptr && output->must_be_replayed()) domain.check_side(tensor_version(*output));
  }
  for (const Input& in : inputs) domain.check_side(tensor_version(*in.version));
}

std::optional<View> Call::read_by(std::size_t i) const {
  if (call_template->reads_shapes_only) return {};
  return call_template->view(i);
}

// The arguments, with tensors on the storages of now in the place of those of then.
torch::jit::Stack Call::filled_in(const std::vector<c10::Storage>& own,
                                  std::vector<at::Tensor>& written) const {
  torch::jit::Stack stack(call_template->arguments.begin(), call_template->arguments.end());
  for (c10::IValue& value : stack) {
    if (value.isTensorList()) value = value.toTensorList().copy();
    if (value.isOptionalTensorList()) value = value.toOptionalTensorList().copy();
  }
  if (fingerprints) written.resize(own.size());
  for (std::size_t i = 0; i < own.size(); ++i) {
    const TensorArgument& argument = call_template->tensors[i];
    at::Tensor tensor =
        argument.same_as >= 0
            ? stack[call_template->tensors[argument.same_as].position].toTensor()
            : call_template->over(own[i] ? own[i] : input(i).current_storage(), argument);
    if (fingerprints && argument.written) written[i] = tensor;
    c10::IValue& place = stack[argument.position];
    if (argument.index < 0) {
      place = std::move(tensor);
    } else if (place.isTensorList()) {
      place.toTensorList().set(argument.index, std::move(tensor));
    } else {
      place.toOptionalTensorList().set(argument.index, std::move(tensor));
    }
  }
  return stack;
}

void Call::replay(Room& room) {
  auto& domain = static_cast<TensorDomain&>(room);
  RECORD_FUNCTION("rematfn::replay " + call_template->op.schema().name(), {});
  const BackendScope backend;
  const c10::AutoGradMode grad_mode(call_template->grad_mode);
  std::unique_lock<std::recursive_mutex> turn;
  std::optional<RandomState> present;
  if (random) {
    turn = take_random_turn(domain);
    present = random->present();
    random->restore();
  }
  const auto put_back = c10::make_scope_exit([&] {
    if (present) present->restore();
  });

  c10::Device entered(c10::kCPU);
  const auto enter_stream = [&](c10::Device device) {
    if (device.is_cpu() || device == entered) return;
    entered = device;
    domain.streams.enter(device);
  };
  for (const Input& in : inputs) {
    const c10::Storage storage = static_cast<TensorVersion&>(*in.version).current_storage();
    enter_stream(storage.device());
    domain.streams.note_use(*storage.unsafeGetStorageImpl());
  }
  check_inputs(domain);
  check_sides(domain);
  const auto refuse = [&](const NoRoom& why, std::size_t /*asked*/) {
    const std::string name = "`" + c10::toString(call_template->op.operator_name()) + "`";
    raise_budget_error(why, name, nullptr, /*in_kernel=*/true);
  };
  const Meter meter(*table, replay_bytes(), refuse);
  std::vector<c10::Storage> own;
  std::vector<at::Tensor> written;
  torch::jit::Stack stack;
  for (bool consumes = false;;) {
    try {
      own = prepare_writes(domain, consumes);
      stack = filled_in(own, written);
      const HeldArguments held(call_template->op, stack);
      SettingsScope settings(call_template->settings, call_template->op.schema().name());
      const std::uint64_t failed = failed_allocations();
      run_below(call_template->op, call_template->keys, call_template->selects_backend, &stack);
      settings.end();
      // See Note [What found no memory may have taken another way]
      check_replay(failed == failed_allocations(),
                   "`" + call_template->op.schema().name() + "` found no memory for what it takes while it runs, "
                   "and had it on its first run. Leave the device more memory, or give it a smaller budget");
      break;
    } catch (const c10::OutOfMemoryError&) {
      // See Note [An operator that found no memory runs again]
      if (consumes || !domain.evict_after_failure(replay_bytes())) throw;
      if (random) random->restore();
    }
  }

  for (std::size_t k = 0; k < outputs.size(); ++k) {
    auto* version = static_cast<TensorVersion*>(outputs[k]);
    if (version == nullptr || !version->must_be_replayed() || !is_wanted(*version)) continue;
    const OutputPlace& place = places[k];
    c10::Storage storage;
    at::Tensor result;
    if (place.written) {
      storage = own[place.position];
      if (fingerprints) result = written[place.position];
    } else {
      for_each_tensor(stack.at(place.position), [&](const at::Tensor& tensor, int index) {
        if (index != place.index) return;
        storage = tensor.storage();
        result = tensor;
      });
    }
    check_replay(storage && storage.nbytes() == version->nbytes,
                 "`" + call_template->op.schema().name() + "` returned other sizes than on its first run");
    verify(k, result);
    enter_stream(storage.device());
    if (gives_zeros) fill_with_zeros(storage);
    refill(*version, std::move(storage));
    domain.arrive(*version);
  }
}

void run_below(const c10::OperatorHandle& op, c10::DispatchKeySet keys, bool selects_backend,
               torch::jit::Stack* stack) {
  if (!selects_backend) {
    op.redispatchBoxed(keys & kBelowLevels, stack);
    return;
  }
  // A factory's backend follows from its options alone, and BackendSelect knows how.
  const c10::impl::ExcludeDispatchKeyGuard above(kAboveLevels);
  op.callBoxed(stack);
}

}  // namespace rematfn
