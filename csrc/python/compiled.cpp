// SPDX-License-Identifier: Apache-2.0
//
// compiled.cpp: `rematfn::compiled` and `compiled_`. See Note [Compiled pieces are operators]

#include <ATen/TensorGeometry.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_conj.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/slice.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/thread_local.h"
#include "levels/boundary.h"
#include "levels/level.h"
#include "python/bindings.h"
#include "tensors/thread_keys.h"

namespace py = pybind11;

namespace rematfn {
namespace {

using Tensors = std::vector<at::Tensor>;

struct Piece {
  std::string kinds;    // of what it is given, in its order: T is a tensor, i and f are numbers
  std::size_t written;  // of these: the first ones. Then it has no results
  py::object run;       // takes a list, which it empties
  py::object bytes_of_results;
};

// Note [A piece outlives its function]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// What has compiled a graph may be gone when a level replays a piece of it. So the pieces are here, by
// numbers. Those of a function that is gone go before the next one is compiled, if no level has any
// operation on record by then. Who compiled it may be collected at any moment, also within an operator,
// so only the numbers are noted then.
using Pieces = std::unordered_map<std::int64_t, Piece>;
Pieces& pieces = *new Pieces;  // outlives the interpreter
std::vector<std::int64_t>& forgotten = *new std::vector<std::int64_t>;

// How a view reads a storage.
struct Reading {
  at::TensorGeometry geometry;
  at::ScalarType dtype;
  bool is_conj;
  bool is_neg;
};

// What a result is: no tensor, or one of the arguments and what is fresh, or a view of that.
struct Part {
  py::object other;
  std::size_t source = 0;  // what is fresh comes after the arguments
  std::optional<Reading> view;
};
using Parts = std::optional<std::vector<Part>>;

REMATFN_THREAD_LOCAL Parts* wanted = nullptr;  // by the call that this thread is in

py::object checked(PyObject* made) {
  if (made != nullptr) return py::reinterpret_steal<py::object>(made);
  python_error error;
  error.persist();
  throw std::move(error);
}

// While it is there dynamo watches no frames: it would compile those of a piece that is replayed.
class Unwatched {
 public:
  Unwatched() = default;
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;
  ~Unwatched() { set(before_); }

  static inline PyObject* set_eval_frame;

 private:
  static py::object set(const py::object& callback) {
    return checked(PyObject_CallOneArg(set_eval_frame, callback.ptr()));
  }

  py::object before_ = set(py::none());
};

py::object call(const Piece& piece, const py::object& function, at::TensorList tensors,
                at::IntArrayRef sizes, at::ArrayRef<double> numbers) {
  py::list given(piece.kinds.size());
  std::size_t place = 0;
  for (const char kind : piece.kinds) {
    PyObject* item = nullptr;
    if (kind == 'T') {
      item = THPVariable_Wrap(tensors.front());
      tensors = tensors.slice(1);
    } else if (kind == 'i') {
      item = PyLong_FromLongLong(sizes.front());
      sizes = sizes.slice(1);
    } else {
      item = PyFloat_FromDouble(numbers.front());
      numbers = numbers.slice(1);
    }
    PyList_SET_ITEM(given.ptr(), static_cast<Py_ssize_t>(place++), checked(item).release().ptr());
  }
  const Unwatched unwatched;
  return checked(PyObject_CallOneArg(function.ptr(), given.ptr()));
}

// Returns a tensor for each storage that is no argument's.
Tensors take_apart(const py::object& results, at::TensorList arguments, std::vector<Part>& parts) {
  Tensors all(arguments.begin(), arguments.end());
  const auto find = [&all](const auto& is_it) {
    return static_cast<std::size_t>(std::ranges::find_if(all, is_it) - all.begin());
  };
  for (const py::handle result : results) {
    Part& part = parts.emplace_back();
    if (!THPVariable_Check(result.ptr())) {
      part.other = py::reinterpret_borrow<py::object>(result);
      continue;
    }
    const at::Tensor& tensor = THPVariable_Unpack(result.ptr());
    part.source = find([&](const at::Tensor& t) { return t.is_same(tensor); });
    if (part.source < all.size()) continue;
    part.source = find([&](const at::Tensor& t) {
      return t.has_storage() && t.is_alias_of(tensor);
    });
    if (part.source == all.size()) {
      all.push_back(tensor);
    } else {
      part.view = Reading{.geometry = at::TensorGeometry(tensor),
                          .dtype = tensor.scalar_type(),
                          .is_conj = tensor.is_conj(),
                          .is_neg = tensor.is_neg()};
    }
  }
  all.erase(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(arguments.size()));
  return all;
}

at::Tensor with_bits(at::Tensor tensor, bool is_conj, bool is_neg) {
  if (tensor.is_conj() != is_conj) tensor = at::_conj(tensor);
  return tensor.is_neg() == is_neg ? tensor : at::_neg_view(tensor);
}

// By operators, since it is a view to levels, too.
at::Tensor view_of(at::Tensor source, const Reading& view) {
  if (source.scalar_type() != view.dtype) {
    const auto nbytes = static_cast<std::int64_t>(source.storage().nbytes());
    const auto elements = nbytes / source.element_size();
    const auto taken = nbytes - nbytes % static_cast<std::int64_t>(c10::elementSize(view.dtype));
    source = at::as_strided(with_bits(std::move(source), false, false), {elements}, {1}, 0);
    source = at::slice(source.view(at::kByte), 0, 0, taken).view(view.dtype);
  }
  const at::TensorGeometry& to = view.geometry;
  source = at::as_strided(source, to.sizes(), to.strides(), to.storage_offset());
  return with_bits(std::move(source), view.is_conj, view.is_neg);
}

Tensors run(at::TensorList tensors, at::IntArrayRef sizes, at::ArrayRef<double> numbers,
            std::int64_t number, std::int64_t) {
  const BackendScope scope;  // See Note [A kernel may be Python]
  const py::gil_scoped_acquire gil;
  const Piece& piece = pieces.at(number);
  const py::object results = call(piece, piece.run, tensors, sizes, numbers);
  std::vector<Part> parts;
  Tensors fresh = take_apart(results, tensors, parts);
  if (wanted != nullptr) *wanted = std::move(parts);
  return fresh;
}

// A tensor of as many bytes as the results have: a level asks for no more.
Tensors run_on_shapes(at::TensorList tensors, at::IntArrayRef sizes, at::ArrayRef<double> numbers,
                      std::int64_t number, std::int64_t) {
  const py::gil_scoped_acquire gil;
  const Piece& piece = pieces.at(number);
  const auto nbytes = call(piece, piece.bytes_of_results, tensors, sizes, numbers).cast<std::int64_t>();
  return {at::empty({nbytes}, at::dtype(at::kByte).device(at::kMeta))};
}

void run_in_place(at::TensorList written, at::TensorList tensors, at::IntArrayRef sizes,
                  at::ArrayRef<double> numbers, std::int64_t number, std::int64_t) {
  const BackendScope scope;  // See Note [A kernel may be Python]
  const py::gil_scoped_acquire gil;
  const Piece& piece = pieces.at(number);
  Tensors all(written.begin(), written.end());
  all.insert(all.end(), tensors.begin(), tensors.end());
  call(piece, piece.run, all, sizes, numbers);
}

void run_in_place_on_shapes(at::TensorList, at::TensorList, at::IntArrayRef, at::ArrayRef<double>, std::int64_t,
                            std::int64_t) {}

template <typename Function>
c10::TypedOperatorHandle<Function> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

void count_writes(c10::DispatchKeySet keys, at::TensorList written, at::TensorList tensors, at::IntArrayRef sizes,
                  at::ArrayRef<double> numbers, std::int64_t number, std::int64_t flops) {
  static const auto op = find_operator<decltype(run_in_place)>("rematfn::compiled_");
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatch(keys & c10::after_ADInplaceOrView_keyset, written, tensors, sizes, numbers, number, flops);
  }
  for (const at::Tensor& tensor : written) tensor.unsafeGetTensorImpl()->bump_version();
}

// See Note [A piece outlives its function]
void free_forgotten() {
  if (forgotten.empty()) return;
  std::size_t operations = 0;
  {
    const py::gil_scoped_release no_gil;
    for_each_live_domain([&](TensorDomain& domain) { operations += domain.live_operations; });
  }
  if (operations > 0) return;
  std::vector<Piece> freed;  // which runs Python
  for (const std::int64_t number : std::exchange(forgotten, {})) {
    freed.push_back(std::move(pieces.extract(number).mapped()));
  }
}

std::int64_t add_piece(std::string kinds, std::size_t written, py::object run, py::object bytes_of_results) {
  static std::int64_t added = 0;
  free_forgotten();
  pieces.emplace(added, Piece{std::move(kinds), written, std::move(run), std::move(bytes_of_results)});
  return added++;
}

void forget_pieces(const std::vector<std::int64_t>& numbers) {
  forgotten.insert(forgotten.end(), numbers.begin(), numbers.end());
}

// Whether a level sees what is done with these.
bool sees_level(const py::list& given) {
  return is_intercepting() || std::ranges::any_of(given, [](const py::handle item) {
           return THPVariable_Check(item.ptr()) && has_key(THPVariable_Unpack(item.ptr()));
         });
}

// The results of a piece, by the operator; None if it has not run. Empties the list.
std::optional<py::list> run_piece(std::int64_t number, std::int64_t flops, const py::list& given) {
  static const auto op = find_operator<decltype(run)>("rematfn::compiled");
  static const auto in_place = find_operator<decltype(run_in_place)>("rematfn::compiled_");
  const Piece& piece = pieces.at(number);
  Tensors all;
  c10::SmallVector<std::int64_t, 4> sizes;
  c10::SmallVector<double, 4> numbers;
  for (std::size_t i = 0; const char kind : piece.kinds) {
    const py::handle item = PyList_GET_ITEM(given.ptr(), static_cast<Py_ssize_t>(i++));
    if (kind == 'T') {
      all.push_back(THPVariable_Unpack(item.ptr()));
    } else if (kind == 'i') {
      sizes.push_back(item.cast<std::int64_t>());
    } else {
      numbers.push_back(item.cast<double>());
    }
  }
  PyList_SetSlice(given.ptr(), 0, PY_SSIZE_T_MAX, nullptr);
  Parts parts;
  if (piece.written > 0) {
    const py::gil_scoped_release no_gil;
    const at::TensorList tensors = all;
    in_place.call(tensors.slice(0, piece.written), tensors.slice(piece.written), sizes, numbers, number, flops);
    parts.emplace();
  } else {
    const py::gil_scoped_release no_gil;
    const auto put_back = c10::make_scope_exit([outer = std::exchange(wanted, &parts)] { wanted = outer; });
    Tensors fresh = op.call(all, sizes, numbers, number, flops);
    std::ranges::move(fresh, std::back_inserter(all));
  }
  if (!parts) return std::nullopt;
  py::list results(parts->size());
  for (Py_ssize_t i = 0; Part& part : *parts) {
    if (!part.other) {
      const at::Tensor& source = all[part.source];
      part.other = checked(THPVariable_Wrap(part.view ? view_of(source, *part.view) : source));
    }
    PyList_SET_ITEM(results.ptr(), i++, part.other.release().ptr());
  }
  return results;
}

void refuse_batches(const c10::OperatorHandle&, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "torch.compile(f, backend=\"rematfn\"): a block that is compiled for single tensors is given a batch of "
      "them, by vmap or is_grads_batched=True. Compile what maps, vmap(f), or leave f uncompiled.");
}

}  // namespace

// The arguments of a piece, by kind; its number here; the FLOPs that it takes.
TORCH_LIBRARY(rematfn, m) {
  m.def("compiled(Tensor[] tensors, int[] sizes, float[] numbers, int piece, int flops) -> Tensor[]");
  m.def("compiled_(Tensor(a!)[] written, Tensor[] tensors, int[] sizes, float[] numbers, int piece, int flops) -> ()");
  m.impl("compiled", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(run));
  m.impl("compiled", c10::DispatchKey::Meta, TORCH_FN(run_on_shapes));
  m.impl("compiled_", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(run_in_place));
  m.impl("compiled_", c10::DispatchKey::Meta, TORCH_FN(run_in_place_on_shapes));
  m.impl("compiled_", c10::DispatchKey::ADInplaceOrView, TORCH_FN(count_writes));
  for (const auto key : {c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched}) {
    for (const char* name : {"compiled", "compiled_"}) {
      m.impl(name, key, torch::CppFunction::makeFromBoxedFunction<&refuse_batches>());
    }
  }
}

void bind_compiled(py::module_& m) {
  m.def("add_piece", &add_piece);
  m.def("forget_pieces", &forget_pieces);
  m.def("run_piece", &run_piece);
  m.def("sees_level", &sees_level);
  const auto eval_frame = py::module_::import("torch._C._dynamo.eval_frame");
  Unwatched::set_eval_frame = py::object(eval_frame.attr("set_eval_frame")).release().ptr();
}

}  // namespace rematfn
