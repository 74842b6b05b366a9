// SPDX-License-Identifier: Apache-2.0
//
// call.h: one recorded call of an operator on tensors, and how to run it again.
//
// Note [A recorded call holds no tensors]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A copy of an argument tensor would hold its storage, so the program's dropping it would free
// nothing. A call keeps a version and the view the operator had of it (sizes, strides, offset, dtype,
// keys) and builds the tensor anew when it is replayed.
//
// Note [Replay restores what a kernel can see]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A kernel's result depends on more than its arguments: on the generator it draws from, on grad mode
// (mkldnn_rnn_layer returns its workspace only with it on), on the default dtype (factories), on
// whether deterministic algorithms are asked for. A replay puts all of these back to what they were,
// runs below everything that interprets operators, and restores the present.
//
// Note [A replay writes to copies]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// The replay of `x.add_(y)` needs the old contents of x and destroys them, and that of a batch norm
// must not move the running statistics again. So what a call writes is handed to its replay as a
// storage of its own: the old version's, if it was recomputed for this call alone, else a copy.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <vector>

#include "level_tensor.h"
#include "operator_facts.h"
#include "rng.h"
#include "verify.h"

namespace rematfn {

// The view that the operator had of inputs[i], for the i-th of these: argument `position` (element
// `index` of it, if a list).
struct TensorArgument {
  c10::DispatchKeySet keys;
  std::int64_t offset;
  std::uint32_t geometry;  // where its sizes stand in the call's geometry, and its strides
  std::uint32_t dimensions;
  std::int32_t index;
  std::uint16_t position;
  caffe2::TypeMeta dtype;
  bool wrapped_number;
  bool written;
};

// Where outputs[i] is found after the call: in its result `position` (element `index`), or, if
// `written`, in the storage of tensor argument `position`.
struct OutputPlace {
  std::uint16_t position;
  std::int32_t index;
  bool written;
};

// See Note [Replay restores what a kernel can see]
struct Surroundings {
  Surroundings();
  bool grad_mode;
  bool deterministic;
  c10::ScalarType default_dtype;
};

struct Call final : Operation, Pooled<Call> {
  explicit Call(const c10::OperatorHandle& op) : op(op) {}

  // Keeps the arguments without their tensors, whose places take_tensor() fills in.
  void take_arguments(c10::ArrayRef<c10::IValue> stack);
  void take_tensor(Ref<Version> version, c10::TensorImpl& tensor, std::uint16_t position,
                   std::int32_t index, bool written);

  // Makes `version` an output. With `result` replays are held to what it is now.
  void add_result(Version& version, OutputPlace place, const at::Tensor* result);

  [[nodiscard]] std::size_t replay_bytes() const;
  void replay(TensorDomain& domain);
  [[nodiscard]] std::string_view name() const override { return op.schema().name(); }

  c10::OperatorHandle op;
  c10::DispatchKeySet keys;
  bool selects_backend = false;
  c10::SmallVector<c10::IValue, 4> arguments;
  c10::SmallVector<TensorArgument, 3> tensors;
  c10::SmallVector<std::int64_t, 12> geometry;
  c10::SmallVector<OutputPlace, 2> places;
  Surroundings surroundings;
  std::shared_ptr<const RandomState> random;
  // One for each output, if the level verifies. See Note [What a fingerprint can tell]
  std::unique_ptr<std::vector<Fingerprint>> fingerprints;
  bool gives_zeros = false;  // See Note [Uninitialised memory is verified as zeros]

 private:
  [[nodiscard]] at::Tensor over(const c10::Storage& storage, const TensorArgument& argument) const;
  void verify(std::size_t output, const at::Tensor& again) const;
  [[nodiscard]] const TensorVersion& input(std::size_t i) const;
  // Storages to be overwritten, by tensor argument; empty where the argument is only read.
  std::vector<c10::Storage> prepare_writes(TensorDomain& domain);
};

// Redispatches below our key: the way every operator goes on, first run or replay. Or calls
// `instead`, if that is given: see Note [Kernels above a level].
void run_below(const c10::OperatorHandle& op, c10::DispatchKeySet keys, bool selects_backend,
               torch::jit::Stack* stack, const c10::SafeKernelFunction* instead = nullptr);

}  // namespace rematfn
