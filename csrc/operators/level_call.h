// SPDX-License-Identifier: Apache-2.0
//
// level_call.h: one operator under its level, from arguments to recorded results.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <optional>

#include "levels/level.h"
#include "operators/call.h"
#include "operators/find_level.h"
#include "operators/footprint.h"
#include "operators/invocation.h"

namespace rematfn {

class LevelCall {
 public:
  LevelCall(Invocation& invocation, Level& level, FoundTensors& found, bool opaque);

  void run();

 private:
  [[nodiscard]] c10::ArrayRef<c10::IValue> arguments() const { return invocation_.arguments(); }
  [[nodiscard]] c10::ArrayRef<c10::IValue> results() const { return invocation_.results(); }
  // As it is seen by a recorder, if it cannot run.
  [[nodiscard]] ObservedCall refused_call() const;
  [[nodiscard]] std::string name() const;
  // Of a call that can be recorded.
  [[nodiscard]] const Ref<Form>& form();
  void make_resident();
  void keep_arguments();
  void settle_raw_memory();
  void save_what_is_overwritten();
  void note_leaves();
  void note_saver_of_arguments();
  void record_arguments();
  void foresee();
  void make_room();
  [[nodiscard]] std::size_t input_bytes_in(const Table& table) const;
  void run_kernel();
  void run_until_it_fits();
  void sort_results();
  bool put_handle_on(c10::TensorImpl& tensor);
  void give_away_parts();
  void record_results();
  void observe_reads(double cost, double flops, std::size_t scratch_bytes);
  void record_write(std::size_t argument);
  void note_keeping(Version& contents) const;
  void record_fresh(c10::TensorImpl& tensor, OutputPlace place);
  void record_result(TensorVersion& contents, OutputPlace place, c10::TensorImpl& tensor);
  void account();
  void pin_for_call(const Ref<TensorVersion>& version);
  void unpin_all();

  struct Fresh {
    c10::TensorImpl* tensor;
    OutputPlace place;
  };
  // A constant's old contents, copied because this call overwrites them.
  struct Saved {
    const c10::StorageImpl* storage;
    Ref<TensorVersion> copy;
  };

  Invocation& invocation_;
  const c10::OperatorHandle& op_;
  const OperatorFacts& facts_;
  Level& level_;
  TensorDomain& domain_;
  FoundTensors& found_;
  const bool recordable_;
  bool bounded_ = false;  // some level around has a budget
  bool metered_ = false;  // so what the operator allocates must be known
  std::uint32_t saver_ = 0;  // the autograd node that may save what is read and made
  bool in_backward_ = false;  // found out where something may be evicted or kept, or is recorded

  Ref<Form> form_;  // once it has been asked for
  c10::SmallVector<Ref<Version>, 6> pinned_;
  c10::SmallVector<Saved, 1> saved_;
  Ref<Call> call_;  // null: nothing that comes of this operator can be replayed
  c10::SmallVector<Fresh, 4> fresh_;
  bool has_parts_ = false;  // some result is no plain tensor, and perhaps made of some that are
  Signature signature_ = 0;
  Foresight foreseen_;
  std::size_t granted_ = 0;  // what room was made for
  std::size_t copied_bytes_ = 0;  // of cells whose old contents were saved
  std::size_t peak_ = 0;     // what the kernel allocated at once
  std::size_t input_bytes_ = 0;
  std::size_t output_bytes_ = 0;
  bool draws_on_cpu_ = false;
  Flops flops_;
  double seconds_ = 0;  // as measured, if the level is timed
  std::optional<ObservedCall> seen_;  // if somebody records or guides
  c10::SmallVector<std::int32_t, 6> read_of_;  // where in seen_.reads a found tensor stands
};

}  // namespace rematfn
