// SPDX-License-Identifier: Apache-2.0
#include "operators/level_call.h"

#include <ATen/Context.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "base/errors.h"
#include "levels/boundary.h"
#include "levels/meter.h"
#include "levels/pressure.h"
#include "levels/weight_cache.h"
#include "tensors/stack_utils.h"

namespace rematfn {
namespace {

bool is_leaf_with_gradient(const c10::TensorImpl& tensor) {
  const auto* meta = static_cast<torch::autograd::AutogradMeta*>(tensor.autograd_meta());
  return meta != nullptr && meta->requires_grad_ && !meta->grad_fn_;
}

// The generator a random operator draws from: the one passed in, else its device's own.
at::Generator generator_of(c10::ArrayRef<c10::IValue> arguments) {
  c10::Device device(c10::kCPU);
  for (const c10::IValue& value : arguments) {
    if (value.isGenerator()) return value.toGenerator();
    if (value.isDevice()) device = value.toDevice();
    for_each_tensor(value, [&](const at::Tensor& tensor, int) {
      if (!tensor.is_cpu()) device = tensor.device();
    });
  }
  return at::globalContext().defaultGenerator(device);
}

// What is left of a storage without bytes takes nothing to have again.
bool empties(const Invocation& invocation) {
  const c10::IValue* size =
      invocation.facts.resizes_storage ? &invocation.arguments()[1] : nullptr;
  return size != nullptr && size->isInt() && size->toInt() == 0;
}

bool is_on_cpu(const FoundTensor& f) { return f.tensor->device().is_cpu(); }

}  // namespace

LevelCall::LevelCall(Invocation& invocation, Level& level, FoundTensors& found, bool opaque)
    : invocation_(invocation),
      op_(invocation.op),
      facts_(invocation.facts),
      level_(level),
      domain_(level.tensor_domain()),
      found_(found),
      recordable_(!opaque && !facts_.never_replayed && !empties(invocation)) {
  for (const Table* t = &level; t != nullptr; t = t->enclosing.get()) {
    bounded_ |= t->budget != kNoBudget;
  }
  metered_ = bounded_ || domain_.recorder;
  in_backward_ = (bounded_ || level_.keeping.decides() || domain_.recorder || domain_.guide) &&
                 torch::autograd::get_current_node();
  domain_.thrash.enter(in_backward_);
}

// The journey of one operator.
void LevelCall::run() {
  std::optional<RandomTurn> turn;
  if (facts_.draws_random) turn.emplace(domain_);
  mark_writes(invocation_, found_);
  if (level_.active) note_leaves();
  note_saver_of_arguments();
  domain_.settle_counters();
  try {
    if (metered_) notice_unrecorded(level_);
    if (facts_.is_view || facts_.announces_address) {
      if (facts_.ends_filling) settle_raw_memory();
      if (facts_.announces_read) make_resident();
      if (facts_.announces_address) keep_arguments();
      run_kernel();
      sort_results();
      unpin_all();
      return;
    }
    if (facts_.changes_metadata) {
      make_resident();
      for (const FoundTensor& f : found_) {
        if (facts_.moves_storage) domain_.expect_move(*f.tensor);
        domain_.expect_bump(*f.tensor);
      }
      run_kernel();
      sort_results();
      unpin_all();
      return;
    }
    if (metered_) foresee();
    settle_raw_memory();
    save_what_is_overwritten();
    make_resident();
    if (facts_.communicates) keep_arguments();
    record_arguments();
    if (bounded_) make_room();
    run_kernel();
    sort_results();
    record_results();
    give_away_parts();
    unpin_all();
    account();
  } catch (const NoRoom& why) {
    unpin_all();
    const ObservedCall refused = refused_call();
    raise_budget_error(why, name(), &refused);
  } catch (...) {
    unpin_all();
    throw;
  }
}

ObservedCall LevelCall::refused_call() const {
  ObservedCall call(op_.schema().name(),
                    {.output_bytes = foreseen_.certain_bytes, .replayable = recordable_});
  for (const FoundTensor& f : found_) {
    if (f.cell != nullptr) call.reads.push_back({f.cell->version, f.written});
  }
  return call;
}

std::string LevelCall::name() const { return "`" + c10::toString(op_.operator_name()) + "`"; }

const Ref<Form>& LevelCall::form() {
  if (!form_) form_ = Forms::of(domain_).of(invocation_, found_);
  return form_;
}

void LevelCall::pin_for_call(const Ref<TensorVersion>& version) {
  pin(*version);
  pinned_.push_back(version);
}

void LevelCall::unpin_all() {
  for (const Ref<Version>& version : pinned_) unpin(*version);
  pinned_.clear();
}

void LevelCall::make_resident() {
  const auto is_missing = [](const FoundTensor& f) {
    return f.cell != nullptr && f.cell->version->place != Place::kHere;
  };
  if (std::any_of(found_.begin(), found_.end(), is_missing)) {
    std::vector<Version*> wanted;
    for (const FoundTensor& f : found_) {
      if (f.cell != nullptr) wanted.push_back(f.cell->version.get());
    }
    domain_.materialize(wanted);
  }
  for (const FoundTensor& f : found_) {
    if (f.cell == nullptr) continue;
    pin_for_call(f.cell->version);
    if (facts_.announces_read) f.cell->version->exposed = domain_.next_order;
  }
}

// See Note [What is asked before bytes are read] and Note [Collectives go on after they return]
void LevelCall::keep_arguments() {
  for (const FoundTensor& f : found_) {
    if (f.cell != nullptr && !f.written && f.cell->version->producer) domain_.cut(*f.cell->version);
  }
}

// See Note [Uninitialised memory is kept]
void LevelCall::settle_raw_memory() {
  for (const FoundTensor& f : found_) {
    if (f.cell == nullptr || !f.cell->version->raw || (f.written && facts_.overwrites)) continue;
    TensorVersion& version = *f.cell->version;
    version.raw = false;
    if (domain_.recorder) domain_.recorder->note_settle(version);
    if (version.producer) domain_.cut(version);
  }
}

// Note [Mutation is a new version]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// After h = x.sin(); x.add_(1) a replay of the sine must see the old x. For a cell that costs
// nothing: the old version stays as lineage and can be replayed into a storage of its own. But the
// contents of an argument, of a parameter or of anything else that cannot be replayed are gone once
// overwritten. If recorded operations have read them, this very call included, they are copied first
// and the copy takes the version's place.
void LevelCall::save_what_is_overwritten() {
  const auto is_replayable_write = [](const FoundTensor& f) {
    return f.written && f.cell != nullptr && f.cell->version->producer;
  };
  if (recordable_ && (facts_.makes_fresh ||
                      std::any_of(found_.begin(), found_.end(), is_replayable_write))) {
    call_ = Ref<Call>(new Call(form()));
  }
  for (const FoundTensor& f : found_) {
    if (!f.written) continue;
    Ref<TensorVersion> version;
    if (f.cell != nullptr && f.cell->version->outside == nullptr) {
      version = f.cell->version;
    } else {
      version = Ref<TensorVersion>(
          domain_.known_outside(*f.storage, bumps_so_far(invocation_, found_, *f.storage)));
      if (!version && f.cell == nullptr && call_) version = domain_.outside_version(*f.tensor);
    }
    if (!version || version->producer) continue;
    const bool saved_before = std::any_of(
        saved_.begin(), saved_.end(), [&](const Saved& s) { return s.storage == f.storage; });
    if (saved_before) continue;
    if (!call_ && version->readers == nullptr) {
      domain_.note_write(*f.storage);
      continue;
    }
    // Of a cell, old and new contents both count from now on.
    if (f.cell != nullptr) copied_bytes_ += version->nbytes;
    domain_.snapshot(*version, level_);
    pin_for_call(version);
    saved_.push_back({f.storage, version});
  }
  for (const FoundTensor& f : found_) {
    if (f.written) domain_.expect_bump(*f.tensor);
  }
}

void LevelCall::note_leaves() {
  for (const FoundTensor& f : found_) {
    if (f.cell != nullptr || !is_leaf_with_gradient(*f.tensor)) continue;
    note_leaf(level_, *f.tensor);
    if (facts_.casts) note_cast(level_, *f.tensor);
  }
}

// See Note [What autograd may have saved]
void LevelCall::note_saver_of_arguments() {
  saver_ = domain_.savers.now(domain_);
  if (saver_ == 0) return;
  for (const FoundTensor& f : found_) {
    if (f.cell != nullptr) note_saver(*f.cell->version, saver_);
  }
}

void LevelCall::record_arguments() {
  for (const FoundTensor& f : found_) input_bytes_ += view_bytes(*f.tensor);
  if (!call_) return;
  call_->table = Ref<Table>(&level_);
  call_->order = domain_.next_order++;
  ++domain_.live_operations;
  call_->inputs.reserve(found_.size());
  for (const FoundTensor& f : found_) {
    Ref<Version> version;
    for (const Saved& saved : saved_) {
      if (saved.storage == f.storage) version = saved.copy;
    }
    if (!version && f.cell != nullptr) version = f.cell->version;
    if (!version && f.tensor->is_wrapped_number()) version = number_version(*f.tensor);
    if (!version) {
      version = domain_.outside_version(*f.tensor, !facts_.reads_shapes_only);
    } else if (f.cell != nullptr && f.cell->version->outside != nullptr) {
      domain_.note_read(*f.cell->version, *f.tensor);
    }
    call_->take_input(std::move(version));
  }
  if (!facts_.draws_random) return;
  const at::Generator generator = generator_of(arguments());
  draws_on_cpu_ = generator.device().is_cpu();
  call_->random = RandomState::of(generator);
}

// Note [Before, not after]
// ~~~~~~~~~~~~~~~~~~~~~~~~~
// A budget that evicts once an operator has run is exceeded by that operator's outputs each time.
// So what a call will allocate is found out first, room for it is made, and an operator that cannot
// fit is refused before it has touched anything.
void LevelCall::foresee() {
  signature_ = recordable_ ? form()->signature : signature_of(op_, arguments());
  foreseen_ = predict(signature_, op_, facts_, arguments());
  granted_ = foreseen_.likely.output_bytes + foreseen_.likely.scratch_bytes;
  for (Table* t = &level_; t != nullptr; t = t->enclosing.get()) {
    const std::size_t inputs = input_bytes_in(*t);
    const std::size_t needed = inputs + foreseen_.certain_bytes;
    t->statistics.min_budget = std::max(t->statistics.min_budget, needed);
    if (needed > t->budget && !t->give_way(needed, granted_)) {
      throw NoRoom{t, needed, inputs};
    }
  }
}

// See Note [What one call teaches decides no other]
void LevelCall::make_room() {
  // Of an accelerator's kernels nothing else is known.
  if (granted_ > foreseen_.certain_bytes && std::all_of(found_.begin(), found_.end(), is_on_cpu)) {
    if (domain_.could_make_room(level_, granted_ + copied_bytes_)) {
      try {
        return domain_.make_room(level_, granted_ + copied_bytes_);
      } catch (const NoRoom&) {
        // what could have gone turned out to be held
      }
    }
    granted_ = foreseen_.certain_bytes;
  }
  domain_.make_room(level_, granted_ + copied_bytes_);
}

// Bytes of the versions the operator reads or writes that count in `table`.
std::size_t LevelCall::input_bytes_in(const Table& table) const {
  std::size_t sum = 0;
  for (std::size_t i = 0; i < found_.size(); ++i) {
    if (found_[i].cell == nullptr) continue;
    const TensorVersion* version = found_[i].cell->version.get();
    const bool counted_before = std::any_of(
        found_.begin(), found_.begin() + static_cast<std::ptrdiff_t>(i),
        [&](const FoundTensor& f) { return f.cell != nullptr && f.cell->version.get() == version; });
    if (version->table && version->table->depth >= table.depth && !counted_before) {
      sum += version->nbytes;
    }
  }
  return sum;
}

void LevelCall::run_kernel() {
  if (facts_.work != Work::kBytes) flops_ = flops_of(facts_, arguments());
  const auto start = level_.timed ? std::chrono::steady_clock::now()
                                  : std::chrono::steady_clock::time_point();
  if (metered_ && !facts_.is_view) {
    Meter meter(level_, granted_, op_);
    try {
      run_until_it_fits();
    } catch (...) {
      // See Note [Scratch is made room for as it is asked for]
      if (meter.refused() > granted_) {
        const std::size_t outputs = std::min(foreseen_.certain_bytes, meter.refused());
        remember(signature_, facts_, {outputs, meter.refused() - outputs});
      }
      throw;
    }
    peak_ = meter.peak();
  } else {
    run_until_it_fits();
  }
  if (level_.timed) {
    seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
}

// See Note [Passive levels]
void LevelCall::run_until_it_fits() {
  for (;;) {
    try {
      return invocation_.run_below();
    } catch (const c10::OutOfMemoryError&) {
      // On a CPU the allocation has been tried again.
      if (!found_.empty() && std::all_of(found_.begin(), found_.end(), is_on_cpu)) throw;
      if (!evict_after_failure(domain_, std::max(granted_, input_bytes_))) throw;
    }
  }
}

}  // namespace rematfn
