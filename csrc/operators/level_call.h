// SPDX-License-Identifier: Apache-2.0
//
// level_call.h: one operator under its level, from arguments to recorded results.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Event.h>
#include <c10/util/SmallVector.h>

#include <optional>

#include "engine/step.h"
#include "levels/level.h"
#include "operators/call.h"
#include "operators/find_level.h"
#include "operators/footprint.h"
#include "operators/invocation.h"

namespace rematfn {

// An operator of the level is about to run on these tensors, whether it makes bytes or not. Returns the node
// of autograd's that may save what it reads and makes.
std::uint32_t note_operator(Level& level, const FoundTensors& found);
// A result that stands on the storage of one of these gets that one's handle. False if it does not.
bool put_handle_on(c10::TensorImpl& tensor, const FoundTensors& found);
// See Note [Hooks of a leaf read by address]
void keep_for_hooks(const torch::autograd::Node* node, c10::ArrayRef<c10::IValue> results);

class LevelCall final : private Step {
 public:
  LevelCall(Invocation& invocation, Level& level, FoundTensors& found, bool opaque,
            const torch::autograd::Node* node);

  void run();

 private:
  [[nodiscard]] c10::ArrayRef<c10::IValue> arguments() const { return invocation_.arguments(); }
  [[nodiscard]] c10::ArrayRef<c10::IValue> results() const { return invocation_.results(); }
  // As it is seen by a recorder, if it cannot run.
  [[nodiscard]] ObservedCall refused_call() const;
  [[nodiscard]] std::string name() const;
  // Of a call that can be recorded.
  [[nodiscard]] const Ref<CallTemplate>& call_template();
  void pass();
  void read_by_address();
  void keep_arguments();
  // Of all arguments: somebody outside goes on to read or fill them by address; or a collective does, or has
  // been waited for.
  void note_addressed();
  void note_communicated(bool communicated);
  void run_measured();
  // level_on_device.cpp
  void enter_stream(c10::Device device);
  void enter_stream_of_generator();
  void enter_capture();
  void keep_for_graph(TensorVersion& version);
  void note_accelerator(c10::Device device);
  void run_until_it_fits();
  void run_until_device_has_room();
  void reserve();
  // Nothing, if it is known how long the call takes, or cannot be found out.
  [[nodiscard]] std::optional<c10::Event> begin_to_time();
  // The call has been enqueued.
  [[nodiscard]] double seconds_since(const std::optional<c10::Event>& begun);
  // That a random operator draws from: the one passed in, else its device's own.
  [[nodiscard]] at::Generator generator() const;
  void note_generator();

  void sort_results();
  void give_away_parts();
  void give_away(Cell& cell, c10::TensorImpl& tensor);
  // By the model, in seconds.
  [[nodiscard]] double cost_of(double flops, std::size_t bytes_moved) const;
  void record_write(std::size_t argument);
  void note_failed_write();
  void record_fresh(const FoundTensor& fresh);
  void record_result(TensorVersion& contents, OutputPlace place, c10::TensorImpl& tensor);
  [[nodiscard]] Call& call() { return static_cast<Call&>(*operation_); }

  [[nodiscard]] std::string_view operator_name() const override { return op_.schema().name(); }
  [[nodiscard]] Site site() const override;
  [[nodiscard]] bool are_on_one_storage(std::size_t operand, std::size_t other) const override {
    return found_[operand].storage == found_[other].storage;
  }
  [[nodiscard]] Need foresee() override;
  [[nodiscard]] bool makes_on_allocator_that_asks() const;
  [[noreturn]] void refuse(NoRoom why, std::size_t asked);
  void prepare() override;
  [[nodiscard]] Ref<Version> find_overwritten(std::size_t operand) override;
  [[nodiscard]] Ref<Version> find_outside(std::size_t operand) override;
  // Of what is about to be overwritten, if it has been copied.
  [[nodiscard]] Ref<Version> copy_of(const FoundTensor& f) const;
  void note_not_copied(std::size_t operand) override;
  void note_not_written(std::size_t operand) override;
  [[nodiscard]] Ref<Operation> make_operation() override;
  void take_inputs() override;
  void run_kernel() override;
  void take_results() override;

  [[nodiscard]] FootprintKey footprint_key();
  [[nodiscard]] c10::Device accelerator() const;  // of the first operand that is on one

  Invocation& invocation_;
  const c10::OperatorHandle& op_;
  const OperatorFacts& facts_;
  Level& level_;
  TensorDomain& domain_;
  FoundTensors& found_;  // the operands
  const torch::autograd::Node* const node_;  // that a backward runs, or null
  std::uint32_t saver_ = 0;  // the autograd node that may save what is read and made

  Ref<CallTemplate> call_template_;  // once it has been asked for
  FoundTensors fresh_;  // among the results
  bool on_accelerator_ = false;  // some operand is
  bool asks_for_room_ = false;   // so does that accelerator's allocator
  bool has_parts_ = false;  // some result is no plain tensor, and perhaps made of some that are
  bool has_objects_ = false;  // or is no value that can be looked into
  FootprintKey footprint_key_ = 0;  // once it has been asked for
  std::size_t peak_ = 0;     // what the kernel allocated at once
  std::size_t input_bytes_ = 0;
  std::size_t output_bytes_ = 0;
  bool draws_on_cpu_ = false;
  c10::Device entered_{c10::kCPU};  // whose stream was entered last
  double seconds_ = 0;  // as measured, if the level is timed
};

}  // namespace rematfn
