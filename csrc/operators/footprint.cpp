// SPDX-License-Identifier: Apache-2.0
#include "operators/footprint.h"

#include <c10/core/Allocator.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <bit>
#include <exception>
#include <sstream>

#include "base/golden_ratio.h"
#include "base/interpreter.h"
#include "tensors/level_tensor.h"
#include "tensors/thread_keys.h"
#include "tensors/stack_utils.h"
#include "tensors/torch_compat.h"

namespace rematfn {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;

// ---- keys ------------------------------------------------------------------------------------

struct Hash {
  std::uint64_t state = 0x243F6A8885A308D3ULL;

  void add(std::uint64_t value) {
    state = (state ^ value) * kGoldenRatio;
    state ^= state >> 32U;
  }
  void add(c10::IntArrayRef values) {
    for (const std::int64_t value : values) add(static_cast<std::uint64_t>(value));
  }
  void add(const c10::TensorImpl& tensor) {
    add(static_cast<std::uint64_t>(c10::typeMetaToScalarType(tensor.dtype())) |
        static_cast<std::uint64_t>(tensor.dim()) << 8U |
        static_cast<std::uint64_t>(tensor.is_wrapped_number()) << 16U |
        static_cast<std::uint64_t>(tensor.key_set().has_backend(c10::BackendComponent::CPUBit))
            << 17U |
        static_cast<std::uint64_t>(tensor.layout()) << 18U);
    if (tensor.has_symbolic_sizes_strides()) return;
    if (tensor.has_storage()) add(tensor.unsafe_storage().nbytes());
    if (tensor.is_nested()) return;  // its sizes differ: to ask for them throws
    add(tensor.sizes());
    if (tensor.layout() != c10::kStrided) return;
    add(tensor.strides());
    add(static_cast<std::uint64_t>(tensor.storage_offset()));
  }
  void add_kind(char kind) { add(static_cast<std::uint64_t>(kind)); }
  // An integer, a truth value and a float of the same bits give results of other types.
  void add(const c10::IValue& value) {
    if (value.isNone()) return add_kind('n');
    if (value.isGenerator()) return add_kind('g');
    if (value.isInt()) {
      add_kind('i');
      return add(static_cast<std::uint64_t>(value.toInt()));
    }
    if (value.isDouble()) {
      add_kind('d');
      return add(std::bit_cast<std::uint64_t>(value.toDouble()));
    }
    if (value.isBool()) return add_kind(value.toBool() ? 't' : 'f');
    if (value.isTensor()) {
      add_kind('T');
      if (value.toTensor().defined()) add(*value.toTensor().unsafeGetTensorImpl());
      return;
    }
    if (value.isList()) {  // of lists, too, which collectives take
      add_kind('L');
      add(value.toListRef().size());
      for (const c10::IValue& each : value.toListRef()) add(each);
      return;
    }
    add_kind('s');
    if (value.isString()) return add(std::hash<std::string>{}(value.toStringRef()));
    // Devices, complex numbers: rare, so by what they print as.
    std::ostringstream text;
    text << value;
    add(std::hash<std::string>{}(text.str()));
  }
};

// ---- shape inference --------------------------------------------------------------------------

// The call's arguments with every tensor on the meta device.
class MetaArguments {
 public:
  MetaArguments(const c10::OperatorHandle& op, Arguments arguments) {
    for (const c10::IValue& value : arguments) stack.push_back(convert(value));
    const auto& schema = op.schema().arguments();
    for (std::size_t i = 0; i < schema.size(); ++i) {
      if (stack[i].isDevice() || (storages_.empty() && schema[i].name() == "device")) {
        stack[i] = c10::Device(c10::kMeta);
      } else if (schema[i].name() == "pin_memory") {
        stack[i] = c10::IValue();
      }
    }
  }

  // Bytes the call added: fresh outputs, and inputs that it made larger.
  [[nodiscard]] std::size_t added() const {
    std::size_t sum = 0;
    std::vector<const c10::StorageImpl*> seen;
    for (const auto& [_, storage, before] : storages_) {
      seen.push_back(storage.unsafeGetStorageImpl());
      if (storage.nbytes() > before) sum += storage.nbytes() - before;
    }
    for (const c10::IValue& value : stack) {
      for_each_tensor(value, [&](const at::Tensor& tensor, int) {
        if (!tensor.has_storage() || tensor._is_zerotensor()) return;
        const auto* storage = tensor.storage().unsafeGetStorageImpl();
        if (std::find(seen.begin(), seen.end(), storage) != seen.end()) return;
        seen.push_back(storage);
        sum += storage->nbytes();
      });
    }
    return sum;
  }

  torch::jit::Stack stack;

 private:
  at::Tensor convert(const at::Tensor& tensor) {
    // A Python number stays where it is: shape functions read its value.
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      storages_.push_back({nullptr, tensor.storage(), tensor.storage().nbytes()});
      return tensor;
    }
    auto meta = at::detail::make_tensor<c10::TensorImpl>(
        convert(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::Meta), tensor.dtype());
    meta.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                      tensor.storage_offset());
    return meta;
  }

  // Operators may allocate by the size of an argument's storage, and make it larger.
  c10::Storage convert(const c10::Storage& storage) {
    for (const Given& given : storages_) {
      if (given.original == storage.unsafeGetStorageImpl()) return given.meta;
    }
    const std::size_t nbytes = storage.nbytes();
    c10::Storage meta(c10::Storage::use_byte_size_t(), nbytes, c10::GetAllocator(c10::kMeta),
                      /*resizable=*/true);
    storages_.push_back({storage.unsafeGetStorageImpl(), meta, nbytes});
    return meta;
  }

  c10::IValue convert(const c10::IValue& value) {
    if (value.isTensor()) {
      return value.toTensor().defined() ? c10::IValue(convert(value.toTensor())) : value;
    }
    if (value.isList()) {
      c10::impl::GenericList list(value.toList().elementType());
      for (const c10::IValue& each : value.toListRef()) list.push_back(convert(each));
      return list;
    }
    return value;
  }

  struct Given {
    const c10::StorageImpl* original;
    c10::Storage meta;
    std::size_t nbytes_before;
  };
  std::vector<Given> storages_;
};

// Of an operator whose output's size depends on data, as a rule an upper bound.
std::size_t bound_of(std::string_view name, Arguments arguments) {
  if (arguments.empty() || !arguments[0].isTensor() || !arguments[0].toTensor().defined()) return 0;
  const at::Tensor& self = arguments[0].toTensor();
  if (!is_plain(*self.unsafeGetTensorImpl())) return 0;
  const auto elements = static_cast<std::size_t>(self.numel());
  if (name == "aten::nonzero" || name == "aten::argwhere") {
    return elements * static_cast<std::size_t>(self.dim()) * sizeof(std::int64_t);
  }
  if (name == "aten::masked_select") {
    return std::max(elements, static_cast<std::size_t>(arguments[1].toTensor().numel())) *
           self.itemsize();
  }
  const bool has_indices = name.find("unique") != std::string_view::npos;  // two for each element
  return elements * (self.itemsize() + (has_indices ? 2 * sizeof(std::int64_t) : 0));
}

}  // namespace

// See Note [Shapes are asked for where they decide]
std::size_t infer_outputs(const c10::OperatorHandle& op, const OperatorFacts& facts, Arguments arguments) {
  try {
    const BackendScope scope;
    MetaArguments meta(op, arguments);
    const HeldArguments held(op, meta.stack);
    op.callBoxed(meta.stack);
    return meta.added();
  } catch (const std::exception& error) {
    if (is_stop(error)) throw;
    if (facts.dynamic_shape) return bound_of(op.schema().name(), arguments);
    return 0;  // no shape function; the first run will tell
  }
}

FootprintKey footprint_key_of(const c10::OperatorHandle& op, Arguments arguments) {
  Hash hash;
  // See Note [Operators are known by an address]
  hash.add(reinterpret_cast<std::uintptr_t>(&op.schema()));
  hash.add(operator_generation());
  hash.add(static_cast<std::uint64_t>(c10::get_default_dtype_as_scalartype()));
  hash.add(static_cast<std::uint64_t>(c10::GradMode::is_enabled()));
  for (const c10::IValue& value : arguments) hash.add(value);
  return hash.state;
}

// See Note [What one call teaches decides no other]
Footprint& footprint_of(FootprintKey key) {
  constexpr std::size_t kMostKnown = std::size_t{1} << 16;
  thread_local ska::flat_hash_map<FootprintKey, Footprint> known;
  if (known.size() > kMostKnown) known.clear();
  return known[key];
}

// See Note [Cost is a model]
double flops_of(const OperatorFacts& facts, Arguments arguments, std::int64_t elements) {
  const auto tensor = [&](std::size_t i) -> const at::Tensor& { return arguments[i].toTensor(); };
  // The kernel will refuse what has not the dimensions that it needs, in words of its own.
  const auto extent = [](const at::Tensor& t, std::int64_t dimension) {
    const bool has = t.dim() >= (dimension < 0 ? -dimension : dimension + 1);
    return has && !t.is_nested() ? static_cast<double>(t.size(dimension)) : 1.0;
  };
  const auto per_channel = [&](const at::Tensor& weight) {
    return static_cast<double>(weight.numel()) / std::max(extent(weight, 0), 1.0);
  };
  const auto for_each = static_cast<double>(elements);
  switch (facts.work) {
    case Work::kBytes:
      return 0;
    case Work::kMatmul: {
      // addmm and baddbmm take the summand first; mm.out and bmm.out take their result third.
      const bool third = arguments.size() > 2 && arguments[2].isTensor();
      const bool summand = third && std::ranges::find(facts.writes, 2) == facts.writes.end();
      return 2 * extent(tensor(summand ? 1 : 0), -1) * for_each;
    }
    case Work::kConvolution:
      return 2 * per_channel(tensor(1)) * for_each;
    case Work::kConvolutionBackward: {
      // One convolution for each gradient that is asked for, the bias's apart.
      const c10::List<bool> asked = arguments.back().toBoolList();
      const double count = static_cast<double>(asked[0]) + static_cast<double>(asked[1]);
      return 2 * count * static_cast<double>(tensor(0).numel()) * per_channel(tensor(2));
    }
    case Work::kAttention:
      // Two products of queries with all keys; the backward's five are judged by their operands.
      return 4 * static_cast<double>(tensor(0).numel()) * extent(tensor(1), -2);
    case Work::kStated:
      return static_cast<double>(arguments.back().toInt());
  }
  return 0;
}

// A CPU of some cores; a data centre's accelerator (A100, H100: 156 to 400 TFLOP/s in sixteen bits, 19 to 60
// in thirty-two, 1.5 to 4.8 TB/s), with a launch by a host that runs a level.
double modelled_cost(double flops, std::size_t bytes_moved, c10::DeviceType device, std::size_t itemsize, bool draws) {
  const auto bytes = static_cast<double>(bytes_moved);
  if (device == c10::DeviceType::CPU) return kOperatorCost + std::max(flops / 50e9, bytes / (draws ? 0.25e9 : 10e9));
  return 10e-6 + std::max(flops / (itemsize <= 2 ? 400e12 : 50e12), bytes / 2.5e12);
}

}  // namespace rematfn
