// SPDX-License-Identifier: Apache-2.0
#include "operators/shapes.h"

#include <ATen/ExpandUtils.h>
#include <ATen/native/TypeProperties.h>
#include <c10/core/DefaultDtype.h>

#include <algorithm>
#include <string>
#include <unordered_map>

#include "tensors/stack_utils.h"
#include "tensors/torch_layout.h"

namespace rematfn {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;
using Bytes = std::optional<std::size_t>;

// ---- in a line ---------------------------------------------------------------------------------

const at::Tensor& tensor(Arguments arguments, std::size_t i) { return arguments[i].toTensor(); }

std::size_t count(const at::Tensor& t) { return static_cast<std::size_t>(t.numel()); }

std::size_t product(c10::IntArrayRef sizes) {
  return static_cast<std::size_t>(c10::multiply_integers(sizes));
}

std::size_t bytes_like(const at::Tensor& t) { return count(t) * t.itemsize(); }

template <std::size_t i>
Bytes like(Arguments arguments) {
  return bytes_like(tensor(arguments, i));
}

Bytes nothing(Arguments) { return 0; }

// Of the dtype in argument `i`, if one is given there.
std::size_t itemsize_of(Arguments arguments, std::size_t i, c10::ScalarType otherwise) {
  return c10::elementSize(arguments[i].isNone() ? otherwise : arguments[i].toScalarType());
}

template <std::size_t dtype>
Bytes like_in_dtype(Arguments arguments) {
  const at::Tensor& self = tensor(arguments, 0);
  return count(self) * itemsize_of(arguments, dtype, self.scalar_type());
}

// Of truth values.
Bytes as_bool(Arguments arguments) { return count(tensor(arguments, 0)); }

Bytes of_size(Arguments arguments) {
  return product(arguments[0].toDimVector()) *
         itemsize_of(arguments, 1, c10::get_default_dtype_as_scalartype());
}

Bytes new_of_size(Arguments arguments) {
  return product(arguments[1].toDimVector()) *
         itemsize_of(arguments, 2, tensor(arguments, 0).scalar_type());
}

// What is computed in wider numbers than it is given is left to torch.
bool is_float_or_double(const at::Tensor& t) {
  return t.scalar_type() == at::kFloat || t.scalar_type() == at::kDouble;
}

Bytes like_floats(Arguments arguments) {
  const at::Tensor& self = tensor(arguments, 0);
  const bool is_complex = std::ranges::any_of(arguments, &c10::IValue::isComplexDouble);
  return is_float_or_double(self) && !is_complex ? Bytes{bytes_like(self)} : Bytes{};
}

Bytes masked_fill(Arguments arguments) {
  const at::Tensor& self = tensor(arguments, 0);
  return product(at::infer_size_dimvector(self.sizes(), tensor(arguments, 1).sizes())) *
         self.itemsize();
}

// (self, dim, index)
Bytes index_select(Arguments arguments) {
  const at::Tensor& self = tensor(arguments, 0);
  if (self.dim() == 0 || self.size(arguments[1].toInt()) == 0) return {};
  return bytes_like(self) / static_cast<std::size_t>(self.size(arguments[1].toInt())) *
         count(tensor(arguments, 2));
}

Bytes where(Arguments arguments) {
  const at::Tensor& self = tensor(arguments, 1);
  const at::Tensor& other = tensor(arguments, 2);
  const auto pair = at::infer_size_dimvector(self.sizes(), other.sizes());
  const auto sizes = at::infer_size_dimvector(tensor(arguments, 0).sizes(), pair);
  return product(sizes) * c10::elementSize(at::result_type(self, other));
}

// (grad, input_sizes, ...): of the sizes of what a part was taken of.
Bytes of_whole(Arguments arguments) {
  return product(arguments[1].toDimVector()) * tensor(arguments, 0).itemsize();
}

// (self, dtype)
Bytes in_one_number(Arguments arguments) {
  const at::Tensor& self = tensor(arguments, 0);
  if (!is_float_or_double(self)) return {};
  return itemsize_of(arguments, 1, self.scalar_type());
}

Bytes stack(Arguments arguments) {
  std::size_t sum = 0;
  const auto dtype = arguments[0].toTensorList().get(0).scalar_type();
  bool mixed = false;
  for_each_tensor(arguments[0], [&](const at::Tensor& t, int) {
    sum += bytes_like(t);
    mixed |= t.scalar_type() != dtype;
  });
  return mixed ? Bytes{} : Bytes{sum};
}

// Those of `like` whose bit in the mask is set; each is as large as its gradient.
std::size_t masked(const c10::IValue& mask, std::initializer_list<std::size_t> bytes) {
  const c10::List<bool> wanted = mask.toBoolList();
  std::size_t sum = 0, i = 0;
  for (const std::size_t b : bytes) {
    if (wanted[i++]) sum += b;
  }
  return sum;
}

// (input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
Bytes convolution(Arguments arguments) {
  const at::Tensor& input = tensor(arguments, 0);
  const at::Tensor& weight = tensor(arguments, 1);
  if (arguments[6].toBool() || input.dim() != weight.dim() || input.dim() < 3) return {};
  const auto stride = arguments[3].toDimVector(), padding = arguments[4].toDimVector(),
             dilation = arguments[5].toDimVector();
  const auto of = [](const auto& values, std::size_t i) {
    return values.size() == 1 ? values[0] : values.at(i);
  };
  std::int64_t elements = input.size(0) * weight.size(0);
  for (std::int64_t d = 2; d < input.dim(); ++d) {
    const auto i = static_cast<std::size_t>(d - 2);
    const std::int64_t reach = of(dilation, i) * (weight.size(d) - 1);
    const std::int64_t extent = input.size(d) + 2 * of(padding, i) - reach - 1;
    if (extent < 0 || of(stride, i) < 1) return {};
    elements *= extent / of(stride, i) + 1;
  }
  return static_cast<std::size_t>(elements) * input.itemsize();
}

// (grad, input, weight, bias_sizes, ..., mask)
Bytes convolution_backward(Arguments arguments) {
  const at::Tensor& weight = tensor(arguments, 2);
  const std::size_t bias =
      arguments[3].isNone() ? 0 : product(arguments[3].toDimVector()) * weight.itemsize();
  return masked(arguments.back(),
                {bytes_like(tensor(arguments, 1)), bytes_like(weight), bias});
}

// (input, normalized_shape, ...): the result, and a mean and a deviation for each row.
Bytes layer_norm(Arguments arguments) {
  const at::Tensor& input = tensor(arguments, 0);
  const std::size_t width = product(arguments[1].toDimVector());
  if (!is_float_or_double(input) || width == 0) return {};
  return bytes_like(input) + 2 * count(input) / width * input.itemsize();
}

// (grad, input, normalized_shape, mean, rstd, weight, bias, mask)
Bytes layer_norm_backward(Arguments arguments) {
  const at::Tensor& input = tensor(arguments, 1);
  if (!is_float_or_double(input)) return {};
  const std::size_t affine = product(arguments[2].toDimVector()) * input.itemsize();
  return masked(arguments.back(), {bytes_like(input), affine, affine});
}

// (input, weight, bias, running_mean, running_var, training, momentum, eps)
Bytes batch_norm(Arguments arguments) {
  const at::Tensor& input = tensor(arguments, 0);
  if (!is_float_or_double(input) || input.dim() < 2) return {};
  const auto channels = static_cast<std::size_t>(input.size(1));
  return bytes_like(input) + (arguments[5].toBool() ? 2 * channels * input.itemsize() : 0);
}

// (grad, input, weight, ..., mask)
Bytes batch_norm_backward(Arguments arguments) {
  const at::Tensor& input = tensor(arguments, 1);
  if (!is_float_or_double(input) || input.dim() < 2) return {};
  const std::size_t affine = static_cast<std::size_t>(input.size(1)) * input.itemsize();
  return masked(arguments.back(), {bytes_like(input), affine, affine});
}

// (input, weight, bias, N, C, HxW, group, eps)
Bytes group_norm(Arguments arguments) {
  const at::Tensor& input = tensor(arguments, 0);
  if (!is_float_or_double(input)) return {};
  const auto groups = static_cast<std::size_t>(arguments[3].toInt() * arguments[6].toInt());
  return bytes_like(input) + 2 * groups * input.itemsize();
}

// (weight, indices, ...)
Bytes embedding(Arguments arguments) {
  const at::Tensor& weight = tensor(arguments, 0);
  if (weight.dim() != 2) return {};
  return count(tensor(arguments, 1)) * static_cast<std::size_t>(weight.size(1)) *
         weight.itemsize();
}

// (grad, indices, num_weights, ...)
Bytes embedding_backward(Arguments arguments) {
  const at::Tensor& grad = tensor(arguments, 0);
  if (grad.dim() == 0) return {};
  return static_cast<std::size_t>(arguments[2].toInt() * grad.size(-1)) * grad.itemsize();
}

// (query, key, value, ...): the result, and a number for each query.
Bytes attention(Arguments arguments) {
  const at::Tensor& query = tensor(arguments, 0);
  if (!is_float_or_double(query) || query.dim() != 4 || query.size(3) == 0) return {};
  return bytes_like(query) +
         count(query) / static_cast<std::size_t>(query.size(3)) * query.itemsize();
}

// (grad, query, key, value, ...)
Bytes attention_backward(Arguments arguments) {
  return bytes_like(tensor(arguments, 1)) + bytes_like(tensor(arguments, 2)) +
         bytes_like(tensor(arguments, 3));
}

// (self, target, weight, reduction, ignore_index): the loss, and what its weights come to.
Bytes nll_loss2d(Arguments arguments) {
  const at::Tensor& self = tensor(arguments, 0);
  const std::size_t losses = arguments[3].toInt() == 0 ? count(tensor(arguments, 1)) : 1;
  return (losses + 1) * self.itemsize();
}

const std::unordered_map<std::string, Bytes (*)(Arguments)>& in_a_line() {
  static const auto* const table = new std::unordered_map<std::string, Bytes (*)(Arguments)>{
      {"aten::relu", like<0>},
      {"aten::bernoulli", like<0>},
      {"aten::bernoulli.p", like<0>},
      {"aten::mse_loss_backward", like<1>},
      {"aten::nll_loss2d_backward", like<1>},
      {"aten::_safe_softmax", like_in_dtype<2>},
      {"aten::logical_not", as_bool},
      {"aten::abs", like_floats},
      {"aten::masked_fill.Scalar", masked_fill},
      {"aten::masked_fill.Tensor", masked_fill},
      {"aten::index_select", index_select},
      {"aten::mul.Scalar", like_floats},
      {"aten::div.Scalar", like_floats},
      {"aten::add.Scalar", like_floats},
      {"aten::sub.Scalar", like_floats},
      {"aten::zeros_like", like_in_dtype<1>},
      {"aten::ones_like", like_in_dtype<1>},
      {"aten::empty_like", like_in_dtype<1>},
      {"aten::zeros", of_size},
      {"aten::ones", of_size},
      {"aten::empty.memory_format", of_size},
      {"aten::new_zeros", new_of_size},
      {"aten::new_ones", new_of_size},
      {"aten::new_empty", new_of_size},
      {"aten::where.self", where},
      {"aten::select_backward", of_whole},
      {"aten::slice_backward", of_whole},
      {"aten::sum", in_one_number},
      {"aten::mean", in_one_number},
      {"aten::stack", stack},
      {"aten::_unsafe_view", nothing},
      {"aten::unsafe_split.Tensor", nothing},
      {"aten::convolution", convolution},
      {"aten::convolution_backward", convolution_backward},
      {"aten::native_layer_norm", layer_norm},
      {"aten::native_layer_norm_backward", layer_norm_backward},
      {"aten::native_batch_norm", batch_norm},
      {"aten::native_batch_norm_backward", batch_norm_backward},
      {"aten::native_group_norm", group_norm},
      {"aten::embedding", embedding},
      {"aten::embedding_dense_backward", embedding_backward},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", attention},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", attention_backward},
      {"aten::nll_loss2d_forward", nll_loss2d},
  };
  return *table;
}

}  // namespace

const c10::KernelFunction* shape_function_of(const c10::OperatorHandle& op) {
  const bool is_torchs = op.schema().name().starts_with("aten::");
  return is_torchs ? first_kernel_of(op, c10::DispatchKey::Meta) : nullptr;
}

std::optional<std::size_t> bytes_added_by(const c10::OperatorHandle& op, Arguments arguments) {
  const auto found = in_a_line().find(c10::toString(op.operator_name()));
  if (found == in_a_line().end()) return {};
  try {
    return found->second(arguments);
  } catch (const std::exception&) {
    return {};  // arguments that the operator itself will refuse
  }
}

}  // namespace rematfn
