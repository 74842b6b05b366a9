// SPDX-License-Identifier: Apache-2.0
//
// call.h: one recorded call of an operator on tensors, and how to run it again.
//
// Note [A recorded call holds no tensors]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A copy of an argument tensor would hold its storage, so the program's dropping it would free
// nothing. A call keeps a version, and in its template the view the operator had of it (sizes, strides,
// offset, dtype, keys), and builds the tensor anew when it is replayed.
//
// Note [Replay restores what a kernel can see]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A kernel's result depends on more than its arguments: on the generator it draws from, on grad mode
// (mkldnn_rnn_layer returns its workspace only with it on), on the settings that choose a kernel and how
// it calculates: see Note [Settings are compared, not watched]. A replay puts all of these back to what
// they were, runs below everything that interprets operators, and restores the present. And where two
// arguments were one tensor, they are one again: _native_multi_head_attention asks, and then has one
// product for query, key and value instead of three.
//
// Note [A replay writes to copies]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// The replay of `x.add_(y)` needs the old contents of x and destroys them, and that of a batch norm
// must not move the running statistics again. So what a call writes is handed to its replay as a
// storage of its own: the old version's, if it was recomputed for this call alone, else a copy; or zeros,
// by Note [Statistics are written aside].

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <optional>
#include <vector>

#include "operators/call_template.h"
#include "tensors/level_tensor.h"
#include "tensors/rng.h"
#include "tensors/verify.h"

namespace rematfn {

// Where outputs[i] is found after the call: in its result `position` (element `index`), or, if
// `written`, in the storage of tensor argument `position`.
struct OutputPlace {
  std::uint16_t position;
  std::int32_t index;
  bool written;
};

struct Call final : TensorOperation, Pooled<Call> {
  explicit Call(Ref<CallTemplate> like) : call_template(std::move(like)) {}

  // What the next of the template's tensors was.
  void take_input(Ref<Version> version);

  // Makes `version` an output. With `result` replays are held to what it is now.
  void add_result(Version& version, OutputPlace place, const at::Tensor* result);

  // What its replays put in the place of tensors that are no inputs.
  [[nodiscard]] std::size_t bytes_aside() const;
  void replay(Room& room) override;
  [[nodiscard]] std::string_view name() const override { return call_template->op.schema().name(); }
  [[nodiscard]] bool writes(std::size_t input) const override { return call_template->tensors[input].written; }
  [[nodiscard]] bool may_overwrite(const Version& version) const override;
  [[nodiscard]] std::optional<View> read_by(std::size_t input) const override;

  Ref<CallTemplate> call_template;
  c10::SmallVector<OutputPlace, 2> places;
  std::shared_ptr<const RandomState> random;
  // One for each output that is compared, if the level verifies. See Note [What a fingerprint can tell]
  std::unique_ptr<std::vector<std::optional<std::uint64_t>>> fingerprints;
  bool gives_zeros = false;  // See Note [Uninitialised memory is verified as zeros]

 private:
  void check_inputs(TensorDomain& domain) const;
  void check_sides(const TensorDomain& domain) const;
  void check_reading(const TensorVersion& version, std::size_t i) const;
  void verify(std::size_t output, const at::Tensor& again) const;
  [[nodiscard]] const TensorVersion& input(std::size_t i) const;
  // Storages to be overwritten, by tensor argument; empty where the argument is only read. Some version
  // may have been consumed.
  std::vector<c10::Storage> prepare_writes(TensorDomain& domain, bool& consumes);
  [[nodiscard]] torch::jit::Stack filled_in(const std::vector<c10::Storage>& own,
                                            std::vector<at::Tensor>& written) const;
};

// Redispatches below our key: the way every operator goes on, first run or replay.
void run_below(const c10::OperatorHandle& op, c10::DispatchKeySet keys, bool selects_backend,
               torch::jit::Stack* stack);

}  // namespace rematfn
