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

bool is_given(const c10::IValue& value) { return value.isTensor() && value.toTensor().defined(); }

std::size_t count(const at::Tensor& t) { return static_cast<std::size_t>(t.numel()); }

std::size_t product(c10::IntArrayRef sizes) {
  return static_cast<std::size_t>(c10::multiply_integers(sizes));
}

std::size_t extent(const at::Tensor& t, std::int64_t dimension) {
  return static_cast<std::size_t>(t.size(dimension));
}

std::size_t bytes_like(const at::Tensor& t) { return count(t) * t.itemsize(); }

// A result like each of these arguments that are given.
template <std::size_t... i>
Bytes like(Arguments arguments) {
  const auto one = [](const c10::IValue& v) { return is_given(v) ? bytes_like(v.toTensor()) : 0; };
  return (std::size_t{0} + ... + one(arguments[i]));
}

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

// And a result like the first.
Bytes with_mask(Arguments arguments) { return *like<0>(arguments) + *as_bool(arguments); }

Bytes with_indices(Arguments arguments) {
  return *like<0>(arguments) + count(tensor(arguments, 0)) * sizeof(std::int64_t);
}

// (self, repeats)
Bytes repeat(Arguments arguments) { return *like<0>(arguments) * product(arguments[1].toDimVector()); }

Bytes of_size(Arguments arguments) {
  return product(arguments[0].toDimVector()) *
         itemsize_of(arguments, 1, c10::get_default_dtype_as_scalartype());
}

Bytes new_of_size(Arguments arguments) {
  return product(arguments[1].toDimVector()) *
         itemsize_of(arguments, 2, tensor(arguments, 0).scalar_type());
}

// (size, value, dtype, ...)
Bytes full(Arguments arguments) {
  const c10::IValue& value = arguments[1];
  const c10::ScalarType dtype = value.isBool()  ? at::kBool
                                : value.isInt() ? at::kLong
                                                : c10::get_default_dtype_as_scalartype();
  if (value.isComplexDouble()) return {};
  return product(arguments[0].toDimVector()) * itemsize_of(arguments, 2, dtype);
}

// ([start,] end, [step,] dtype, ...): of integers.
template <std::size_t numbers>
Bytes arange(Arguments arguments) {
  if (!std::ranges::all_of(arguments.slice(0, numbers), &c10::IValue::isInt)) return {};
  const std::int64_t start = numbers == 1 ? 0 : arguments[0].toInt();
  const std::int64_t length = arguments[numbers == 1 ? 0 : 1].toInt() - start;
  const std::int64_t step = numbers == 3 ? arguments[2].toInt() : 1;
  if (step == 0) return {};
  const std::int64_t elements = (length + step + (step > 0 ? -1 : 1)) / step;
  return static_cast<std::size_t>(elements) * itemsize_of(arguments, numbers, at::kLong);
}

// (self, pad, ...): what is added before and after, from the last dimension on.
Bytes constant_pad(Arguments arguments) {
  const at::Tensor& self = tensor(arguments, 0);
  const auto pad = arguments[1].toDimVector();
  std::size_t elements = 1;
  for (std::size_t d = 0; d < static_cast<std::size_t>(self.dim()); ++d) {
    const std::int64_t added = 2 * d < pad.size() ? pad[2 * d] + pad.at(2 * d + 1) : 0;
    elements *= static_cast<std::size_t>(self.size(self.dim() - 1 - static_cast<std::int64_t>(d)) + added);
  }
  return elements * self.itemsize();
}

// What is computed in wider numbers than it is given is left to torch.
bool is_float_or_double(const at::Tensor& t) {
  return t.scalar_type() == at::kFloat || t.scalar_type() == at::kDouble;
}

bool is_floating(const at::Tensor& t) {
  return is_float_or_double(t) || t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
}

// What kernels add such numbers up in.
std::size_t wide(const at::Tensor& t) { return std::max(t.itemsize(), sizeof(float)); }

// A mean of such numbers, where it is no wider than the widest of them and of the parameters.
std::size_t narrow(const at::Tensor& t, const c10::IValue& parameter) {
  return is_given(parameter) && parameter.toTensor().scalar_type() != t.scalar_type() ? wide(t)
                                                                                     : t.itemsize();
}

// A CPU's is.
std::size_t mean_of(const at::Tensor& t, const c10::IValue& parameter) {
  return t.is_cpu() ? narrow(t, parameter) : wide(t);
}

Bytes like_floats(Arguments arguments) {
  const at::Tensor& self = tensor(arguments, 0);
  const bool is_complex = std::ranges::any_of(arguments, &c10::IValue::isComplexDouble);
  return is_floating(self) && !is_complex ? Bytes{bytes_like(self)} : Bytes{};
}

// Lists of one dtype and as many bytes: a result like each of the first.
Bytes like_lists(Arguments arguments) {
  const c10::ScalarType dtype = arguments[0].toTensorList().get(0).scalar_type();
  std::size_t first = 0;
  bool alike = !std::ranges::any_of(arguments, &c10::IValue::isComplexDouble);
  for (const c10::IValue& argument : arguments) {
    if (!is_tensor_list(argument)) continue;
    std::size_t sum = 0;
    for_each_tensor(argument, [&](const at::Tensor& t, int) {
      sum += bytes_like(t);
      alike &= is_floating(t) && t.scalar_type() == dtype;
    });
    if (&argument == arguments.begin()) first = sum;
    alike &= sum == first;
  }
  return alike ? Bytes{first} : Bytes{};
}

// (self, ord, dtype): a number for each tensor.
Bytes norms(Arguments arguments) {
  const auto self = arguments[0].toTensorList();
  const at::Tensor& first = self.get(0);
  const bool alike = std::ranges::all_of(
      self.vec(), [&](const at::Tensor& t) { return is_floating(t) && t.dtype() == first.dtype(); });
  return alike ? Bytes{self.size() * itemsize_of(arguments, 2, first.scalar_type())} : Bytes{};
}

// Whether it makes of each tensor of a list one that is as large.
bool is_listwise(std::string_view name) {
  constexpr std::string_view kPrefix = "aten::_foreach_";
  if (!name.starts_with(kPrefix) || name == "aten::_foreach_pow.ScalarAndTensor") return false;
  const std::string_view base = name.substr(kPrefix.size(), name.find('.') - kPrefix.size());
  return base != "max" && base != "powsum" && base != "mm";
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
  return bytes_like(self) / extent(self, arguments[1].toInt()) * count(tensor(arguments, 2));
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
  if (!is_floating(self)) return {};
  return itemsize_of(arguments, 1, self.scalar_type());
}

// (self, dim, ...): `results` of them, a number for each row.
template <std::size_t results>
Bytes of_rows(Arguments arguments) {
  const at::Tensor& self = tensor(arguments, 0);
  if (!is_floating(self) || count(self) == 0) return {};
  std::size_t row = 1;
  const bool is_whole = arguments[1].isNone() || arguments[1].toDimVector().empty();
  if (is_whole) {
    row = count(self);
  } else if (self.dim() > 0) {
    for (const std::int64_t d : arguments[1].toDimVector()) row *= extent(self, d);
  }
  return results * count(self) / row * self.itemsize();
}

// A loss of `self` alone, or one for each element: (self, target, ..., reduction, ...)
template <std::size_t reduction>
Bytes loss(Arguments arguments) {
  const at::Tensor& self = tensor(arguments, 0);
  if (tensor(arguments, 1).sizes() != self.sizes()) return {};
  return (arguments[reduction].toInt() == 0 ? count(self) : 1) * self.itemsize();
}

Bytes nothing(Arguments) { return 0; }

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
    if (i < wanted.size() && wanted[i++]) sum += b;
  }
  return sum;
}

// (input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
Bytes convolution(Arguments arguments) {
  const at::Tensor& input = tensor(arguments, 0);
  const at::Tensor& weight = tensor(arguments, 1);
  if (input.dim() != weight.dim() || input.dim() < 3) return {};
  const bool transposed = arguments[6].toBool();
  const auto parameter = [&](std::size_t argument, std::size_t i) {
    const auto values = arguments[argument].toDimVector();
    return values.size() == 1 ? values[0] : values.at(i);
  };
  std::int64_t elements =
      input.size(0) * (transposed ? weight.size(1) * arguments[8].toInt() : weight.size(0));
  for (std::int64_t d = 2; d < input.dim(); ++d) {
    const auto i = static_cast<std::size_t>(d - 2);
    const std::int64_t stride = parameter(3, i);
    const std::int64_t reach = parameter(5, i) * (weight.size(d) - 1) - 2 * parameter(4, i);
    if (stride < 1) return {};
    const std::int64_t extent = transposed
                                    ? (input.size(d) - 1) * stride + reach + parameter(7, i) + 1
                                    : (input.size(d) - reach - 1 + stride) / stride;
    if (extent < 1) return {};
    elements *= extent;
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

// A gradient of a norm's parameter; of one that is not given, like those of the input.
std::size_t affine(Arguments arguments, std::size_t weight, std::size_t elements) {
  return elements * (is_given(arguments[weight]) ? tensor(arguments, weight)
                                                 : tensor(arguments, 1)).itemsize();
}

// (input, normalized_shape, weight, ...): the result, and `means` numbers for each row.
template <std::size_t means>
Bytes layer_norm(Arguments arguments) {
  const at::Tensor& input = tensor(arguments, 0);
  const std::size_t width = product(arguments[1].toDimVector());
  if (!is_floating(input) || width == 0) return {};
  return bytes_like(input) + means * count(input) / width * mean_of(input, arguments[2]);
}

// (grad, input, normalized_shape, ..., weight, [bias,] mask)
template <std::size_t weight>
Bytes layer_norm_backward(Arguments arguments) {
  if (!is_floating(tensor(arguments, 1))) return {};
  const std::size_t each = affine(arguments, weight, product(arguments[2].toDimVector()));
  return masked(arguments.back(), {bytes_like(tensor(arguments, 1)), each, each});
}

// (input, weight, bias, running_mean, running_var, ...)
Bytes trained_batch_norm(Arguments arguments) {
  const at::Tensor& input = tensor(arguments, 0);
  if (!is_floating(input) || input.dim() < 2) return {};
  return bytes_like(input) + 2 * extent(input, 1) * mean_of(input, arguments[1]);
}

// (input, weight, bias, running_mean, running_var, training, ...)
Bytes batch_norm(Arguments arguments) {
  return arguments[5].toBool() ? trained_batch_norm(arguments) : like<0>(arguments);
}

// (grad, input, weight, ..., mask, ...)
template <std::size_t mask>
Bytes batch_norm_backward(Arguments arguments) {
  const at::Tensor& input = tensor(arguments, 1);
  if (!is_floating(input) || input.dim() < 2) return {};
  const std::size_t each = affine(arguments, 2, extent(input, 1));
  return masked(arguments[mask], {bytes_like(input), each, each});
}

// (input, weight, bias, N, C, HxW, group, eps)
Bytes group_norm(Arguments arguments) {
  const at::Tensor& input = tensor(arguments, 0);
  if (!is_floating(input)) return {};
  const auto groups = static_cast<std::size_t>(arguments[3].toInt() * arguments[6].toInt());
  return bytes_like(input) + 2 * groups * narrow(input, arguments[1]);
}

// (grad, input, mean, rstd, weight, N, C, HxW, group, mask)
Bytes group_norm_backward(Arguments arguments) {
  const std::size_t each = affine(arguments, 4, static_cast<std::size_t>(arguments[6].toInt()));
  return masked(arguments.back(), {bytes_like(tensor(arguments, 1)), each, each});
}

// (weight, indices, ...)
Bytes embedding(Arguments arguments) {
  const at::Tensor& weight = tensor(arguments, 0);
  if (weight.dim() != 2) return {};
  return count(tensor(arguments, 1)) * extent(weight, 1) * weight.itemsize();
}

// (grad, indices, num_weights, ...)
Bytes embedding_backward(Arguments arguments) {
  const at::Tensor& grad = tensor(arguments, 0);
  if (grad.dim() == 0) return {};
  return static_cast<std::size_t>(arguments[2].toInt()) * extent(grad, -1) * grad.itemsize();
}

// (query, key, value, ...): the result; a logarithm for each query, of which some kernels make a multiple,
// and some only if an argument asks for them; and where the generator was.
template <std::size_t generator_bytes, std::size_t asks = 0, std::size_t multiple = 1>
Bytes attention(Arguments arguments) {
  const at::Tensor& query = tensor(arguments, 0);
  if (!is_floating(query) || query.dim() < 3 || count(query) == 0) return {};
  const std::size_t rows = count(query) / extent(query, -1);
  const std::size_t queries = extent(query, -2);
  const std::size_t logarithms = rows / queries * ((queries + multiple - 1) / multiple * multiple);
  const bool asked = asks == 0 || arguments[asks].toBool();
  return rows * extent(tensor(arguments, 2), -1) * query.itemsize() +
         (asked ? logarithms * wide(query) : 0) + generator_bytes;
}

// (grad, query, key, value, bias, ...)
template <std::size_t mask>
Bytes attention_backward_with_bias(Arguments arguments) {
  std::size_t bias = 0;
  if (is_given(arguments[4]) && arguments[mask].toBoolList()[3]) {
    const at::Tensor& t = tensor(arguments, 4);
    constexpr std::size_t kMultiple = 16;
    const std::size_t row = extent(t, -1);
    if (row == 0) return {};
    bias = bytes_like(t) / row * ((row + kMultiple - 1) / kMultiple * kMultiple);
  }
  return *like<1, 2, 3>(arguments) + bias;
}

// (self, target, weight, reduction, ignore_index): the loss, and what its weights come to.
Bytes nll_loss2d(Arguments arguments) {
  const at::Tensor& self = tensor(arguments, 0);
  const std::size_t losses = arguments[3].toInt() == 0 ? count(tensor(arguments, 1)) : 1;
  return (losses + 1) * self.itemsize();
}

// (input, grid, ...): for each place of the grid a number of each channel.
Bytes grid_sampler(Arguments arguments) {
  const at::Tensor& input = tensor(arguments, 0);
  const at::Tensor& grid = tensor(arguments, 1);
  return count(grid) / extent(grid, -1) * extent(input, 1) * input.itemsize();
}

// (grad, input, grid, ..., mask)
Bytes grid_sampler_backward(Arguments arguments) {
  return masked(arguments.back(), {bytes_like(tensor(arguments, 1)), 0}) + *like<2>(arguments);
}

// (self, output_size)
Bytes adaptive_pool(Arguments arguments) {
  const at::Tensor& self = tensor(arguments, 0);
  if (count(self) == 0) return {};
  const auto size = arguments[1].toDimVector();
  std::size_t window = 1;
  for (std::size_t d = 1; d <= size.size(); ++d) window *= extent(self, -static_cast<std::int64_t>(d));
  return bytes_like(self) / window * product(size);
}

// (input, weight, weight_stride0, weight_buf, hx, cx, mode, hidden_size, proj_size, num_layers, batch_first,
// dropout, train, bidirectional, batch_sizes, dropout_state): what is kept for the backward, cuDNN knows.
Bytes cudnn_rnn(Arguments arguments) {
  const at::Tensor& input = tensor(arguments, 0);
  const std::int64_t width = arguments[8].toInt() == 0 ? arguments[7].toInt() : arguments[8].toInt();
  const std::int64_t directions = arguments[13].toBool() ? 2 : 1;
  return count(input) / extent(input, -1) * static_cast<std::size_t>(width * directions) * input.itemsize() +
         *like<4, 5>(arguments);
}

const std::unordered_map<std::string, Bytes (*)(Arguments)>& in_a_line() {
  static const auto* const table = new std::unordered_map<std::string, Bytes (*)(Arguments)>{
      {"aten::relu", like<0>},
      {"aten::bernoulli", like<0>},
      {"aten::bernoulli.p", like<0>},
      {"aten::hardtanh", like<0>},
      {"aten::hardtanh_backward", like<1>},
      {"aten::hardswish", like<0>},
      {"aten::hardswish_backward", like<1>},
      {"aten::log_sigmoid_backward", like<1>},
      {"aten::glu_backward", like<1>},
      {"aten::mish_backward", like<1>},
      {"aten::_prelu_kernel", like<0>},
      {"aten::_prelu_kernel_backward", like<1, 1>},
      {"aten::index_put", like<0>},
      {"aten::roll", like<0>},
      {"aten::flip", like<0>},
      {"aten::repeat", repeat},
      {"aten::sort", with_indices},
      {"aten::sort.stable", with_indices},
      {"aten::native_dropout", with_mask},
      {"aten::_fused_dropout", with_mask},
      {"aten::native_dropout_backward", like<0>},
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
      {"aten::rand_like", like_in_dtype<1>},
      {"aten::randn_like", like_in_dtype<1>},
      {"aten::full_like", like_in_dtype<2>},
      {"aten::rand", of_size},
      {"aten::randn", of_size},
      {"aten::full", full},
      {"aten::arange", arange<1>},
      {"aten::arange.start", arange<2>},
      {"aten::arange.start_step", arange<3>},
      {"aten::constant_pad_nd", constant_pad},
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
      {"aten::std.correction", of_rows<1>},
      {"aten::var.correction", of_rows<1>},
      {"aten::std_mean.correction", of_rows<2>},
      {"aten::var_mean.correction", of_rows<2>},
      {"aten::logsumexp", of_rows<1>},
      {"aten::stack", stack},
      {"aten::_foreach_norm.Scalar", norms},
      {"aten::_unsafe_view", nothing},
      {"aten::unsafe_split.Tensor", nothing},
      {"aten::convolution", convolution},
      {"aten::convolution_backward", convolution_backward},
      {"aten::native_layer_norm", layer_norm<2>},
      {"aten::native_layer_norm_backward", layer_norm_backward<5>},
      {"aten::_fused_rms_norm", layer_norm<1>},
      {"aten::_fused_rms_norm_backward", layer_norm_backward<4>},
      {"aten::native_batch_norm", batch_norm},
      {"aten::native_batch_norm_backward", batch_norm_backward<9>},
      {"aten::cudnn_batch_norm", batch_norm},
      {"aten::cudnn_batch_norm_backward", like<0, 2, 2>},
      {"aten::_batch_norm_with_update", trained_batch_norm},
      {"aten::batch_norm_backward", batch_norm_backward<9>},
      {"aten::native_group_norm", group_norm},
      {"aten::native_group_norm_backward", group_norm_backward},
      {"aten::embedding", embedding},
      {"aten::embedding_dense_backward", embedding_backward},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", attention<0>},
      {"aten::_scaled_dot_product_flash_attention", attention<24>},
      {"aten::_flash_attention_forward", attention<24>},
      {"aten::_scaled_dot_product_efficient_attention", attention<16, 4, 32>},
      {"aten::_scaled_dot_product_cudnn_attention", attention<16, 4>},
      {"aten::_scaled_dot_product_fused_attention_overrideable", attention<16>},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", like<1, 2, 3>},
      {"aten::_scaled_dot_product_flash_attention_backward", like<1, 2, 3>},
      {"aten::_flash_attention_backward", like<1, 2, 3>},
      {"aten::_scaled_dot_product_efficient_attention_backward", attention_backward_with_bias<10>},
      {"aten::_scaled_dot_product_cudnn_attention_backward", like<1, 2, 3>},
      {"aten::_scaled_dot_product_fused_attention_overrideable_backward", like<1, 2, 3, 4>},
      {"aten::nll_loss2d_forward", nll_loss2d},
      {"aten::nll_loss2d_backward", like<1>},
      {"aten::mse_loss_backward", like<1>},
      {"aten::huber_loss", loss<2>},
      {"aten::huber_loss_backward", like<1>},
      {"aten::smooth_l1_loss_backward", like<1>},
      {"aten::binary_cross_entropy", loss<3>},
      {"aten::binary_cross_entropy_backward", like<1>},
      {"aten::binary_cross_entropy_with_logits", loss<4>},
      {"aten::grid_sampler_2d", grid_sampler},
      {"aten::grid_sampler_3d", grid_sampler},
      {"aten::grid_sampler_2d_backward", grid_sampler_backward},
      {"aten::grid_sampler_3d_backward", grid_sampler_backward},
      {"aten::_adaptive_avg_pool2d", adaptive_pool},
      {"aten::_adaptive_avg_pool2d_backward", like<1>},
      {"aten::_cudnn_rnn", cudnn_rnn},
      {"aten::_thnn_fused_lstm_cell", like<2, 2, 0>},
  };
  return *table;
}

}  // namespace

const c10::KernelFunction* shape_function_of(const c10::OperatorHandle& op) {
  const bool is_torchs = op.schema().name().starts_with("aten::");
  return is_torchs ? first_kernel_of(op, c10::DispatchKey::Meta) : nullptr;
}

std::optional<std::size_t> bytes_added_by(const c10::OperatorHandle& op, Arguments arguments) {
  const std::string name = c10::toString(op.operator_name());
  const auto found = in_a_line().find(name);
  if (found == in_a_line().end() && !is_listwise(name)) return {};
  try {
    return found == in_a_line().end() ? like_lists(arguments) : found->second(arguments);
  } catch (const std::exception&) {
    return {};  // arguments that the operator itself will refuse
  }
}

}  // namespace rematfn
