// SPDX-License-Identifier: Apache-2.0
#include "operators/level_call.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/FuncTorchTLS.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "base/errors.h"
#include "base/interpreter.h"
#include "levels/allocator.h"
#include "levels/boundary.h"
#include "levels/device_memory.h"
#include "levels/governed_nodes.h"
#include "levels/meter.h"
#include "levels/pressure.h"
#include "levels/refusals.h"
#include "tensors/stack_utils.h"
#include "tensors/thread_keys.h"

namespace rematfn {
namespace {

bool is_leaf_with_gradient(const c10::TensorImpl& tensor) {
  const auto* meta = static_cast<torch::autograd::AutogradMeta*>(tensor.autograd_meta());
  return meta != nullptr && meta->requires_grad_ && !meta->grad_fn_;
}

// What is left of a storage without bytes takes nothing to have again.
bool empties(const Invocation& invocation) {
  const c10::IValue* size =
      invocation.facts.resizes_storage ? &invocation.arguments()[1] : nullptr;
  return size != nullptr && size->isInt() && size->toInt() == 0;
}

// Below functorch nobody can tell whether autograd made a node before it called us; that it has is then the
// safer answer.
bool has_node(const FoundTensors& found) {
  return at::GradMode::is_enabled() &&
         (at::functorch::functorchTLSAccessor() != nullptr ||
          std::ranges::any_of(found, [](const FoundTensor& f) { return f.tensor->requires_grad(); }));
}

}  // namespace

std::uint32_t note_operator(Level& level, const FoundTensors& found) {
  TensorDomain& domain = level.tensor_domain();
  const std::uint64_t thread = at::RecordFunction::currentThreadId();
  if (thread != level.last_thread) [[unlikely]] level.enter_thread(thread, has_node(found));
  for (const FoundTensor& f : found) {
    if (level.active && f.cell == nullptr && is_leaf_with_gradient(*f.tensor)) note_leaf(level, *f.tensor);
  }
  // See Note [What autograd may have saved]
  const std::uint32_t saver = domain.savers.now(domain, thread);
  for (const FoundTensor& f : found) {
    if (saver != 0 && f.cell != nullptr) f.cell->version->savers.add(saver);
  }
  domain.outside.note_bumps();
  return saver;
}

LevelCall::LevelCall(Invocation& invocation, Level& level, FoundTensors& found, bool opaque,
                     const torch::autograd::Node* node)
    : Step(level.tensor_domain(), level),
      invocation_(invocation),
      op_(invocation.op),
      facts_(invocation.facts),
      level_(level),
      domain_(level.tensor_domain()),
      found_(found),
      node_(node) {
  nature_.raw = facts_.leaves_raw;
  nature_.replayable = !opaque && !facts_.never_replayed && !empties(invocation) &&
                       !(facts_.races != Races::kNever && races(facts_.races, arguments()));
  nature_.makes_fresh = facts_.makes_fresh;
  nature_.writes_aside = facts_.writes_aside;
  nature_.communicated = facts_.communicates && !facts_.ends_work;
  nature_.work = facts_.work;
  // Found out where something may be evicted or kept, or is recorded.
  nature_.backward =
      (is_bounded_ || level_.policy.keeping.decides() || domain_.observers.see_calls()) &&
      node_ != nullptr;
}

void LevelCall::run() {
  std::unique_lock<std::recursive_mutex> turn;
  if (facts_.draws_random) [[unlikely]] turn = take_random_turn(domain_);
  operands_.resize(found_.size());
  for (std::size_t i = 0; i < found_.size(); ++i) {
    const FoundTensor& f = found_[i];
    const bool known = f.cell != nullptr;
    set_operand(i, known ? f.cell->version.get() : nullptr, known ? f.cell->level.get() : nullptr,
                f.written);
    if (f.tensor->device().is_cpu()) continue;
    on_accelerator_ = true;
    enter_stream(f.tensor->device());
  }
  if (on_accelerator_) note_accelerator(accelerator());
  if (facts_.draws_random && nature_.replayable) [[unlikely]] enter_stream_of_generator();
  if (!on_accelerator_ && domain_.streams.any()) domain_.streams.see_captures();
  if (domain_.streams.is_captured()) [[unlikely]] enter_capture();
  count_inputs();
  saver_ = note_operator(level_, found_);
  domain_.bury_unreported(/*at_once=*/false);
  domain_.outside.release_dropped_at_times(is_bounded_);
  try {
    if (is_metered_) notice_unrecorded(level_);
    if (is_bounded_) stop_if_thrashing(level_);
    if (facts_.is_view || facts_.announces_address || facts_.changes_metadata) [[unlikely]] {
      pass();
      give_away_parts();
      return keep_for_hooks(node_, results());
    }
    Step::run();
    give_away_parts();
    keep_for_hooks(node_, results());  // See Note [Hooks of a leaf read by address]
    finish();
    if (!is_bounded_ && !on_accelerator_) relieve_pressure(level_, output_bytes_);
  } catch (const NoRoom& why) {
    unpin_all();
    refuse(why, /*asked=*/0);
  }
}

// See Note [What is asked before bytes are read]
void LevelCall::read_by_address() {
  for (const Operand& operand : operands_) {
    if (operand.home == nullptr) continue;
    Version* wanted = operand.version;
    domain_.materialize({&wanted, 1});
    domain_.observers.note(Trace::What::kRead, *wanted);
    pin_for_step(*wanted);
  }
}

// An operator that makes no bytes: views, addresses, metadata.
void LevelCall::pass() {
  if (facts_.ends_filling) prepare();
  if (facts_.announces_read || facts_.changes_metadata) read_by_address();
  for (const FoundTensor& f : found_) {
    if (!facts_.announces_read || f.cell == nullptr) continue;
    f.cell->version->exposed = domain_.next_order;
  }
  if (facts_.announces_address) {
    keep_arguments();
    note_addressed();
  }
  if (facts_.changes_metadata) {
    for (const FoundTensor& f : found_) {
      if (f.position != 0) continue;  // others are read
      if (facts_.moves_storage) domain_.outside.expect_move(*f.tensor);
      domain_.outside.expect_bump(*f.tensor);
    }
  }
  run_measured();
  sort_results();
  unpin_all();
}

ObservedCall LevelCall::refused_call() const {
  ObservedCall call(op_.schema().name(),
                    {.output_bytes = need_.certain_bytes,
                     .replayable = nature_.replayable,
                     .backward = nature_.backward});
  for (std::size_t i = 0; i < found_.size(); ++i) {
    // As it was: of what has been copied already, the cell has other contents by now.
    if (found_[i].cell == nullptr || operands_[i].version == nullptr) continue;
    call.reads.push_back({Ref<Version>(operands_[i].version), found_[i].written});
  }
  return call;
}

Site LevelCall::site() const {
  const bool numbers_are_its = at::RecordFunction::currentThreadId() == level_.thread;
  Site site{.nodes = numbers_are_its ? at::sequence_number::peek() : 0};
  if (node_ != nullptr) {
    site.node = node_->sequence_nr();
  } else {
    site.place = place_in_program();
  }
  return site;
}

std::string LevelCall::name() const { return "`" + c10::toString(op_.operator_name()) + "`"; }

const Ref<CallTemplate>& LevelCall::call_template() {
  if (!call_template_) call_template_ = CallTemplates::of(domain_).of(invocation_, found_);
  return call_template_;
}

FootprintKey LevelCall::footprint_key() {
  if (footprint_key_ == 0) {
    footprint_key_ = nature_.replayable ? call_template()->footprint_key
                                        : footprint_key_of(op_, arguments());
  }
  return footprint_key_;
}

// ---- the step -----------------------------------------------------------------------------------

LevelCall::Need LevelCall::foresee() {
  const bool may_write_before = writes_ && facts_.makes_fresh && !nature_.writes_aside;  // a batch norm allocates first
  const bool is_asked = makes_on_allocator_that_asks() && !may_write_before;
  std::optional<std::size_t> last = footprint_of(footprint_key()).nbytes;
  if (!last) last = footprint_of(footprint_key()).nbytes = is_asked ? 0 : infer_outputs(op_, facts_, arguments());
  const std::size_t likely = *last;
  return {is_asked ? 0 : likely, likely};  // where nobody asks, what is not foreseen is not counted
}

bool LevelCall::makes_on_allocator_that_asks() const {
  c10::Device device = on_accelerator_ ? accelerator() : c10::Device(c10::kCPU);
  for (const c10::IValue& value : arguments()) {
    if (value.isDevice()) device = value.toDevice();
  }
  if (device.is_meta()) return true;  // there are no bytes to ask for
  return device.is_cpu() ? is_allocator_installed() : asks_for_room(device.type());
}

// See Note [Shapes are asked for where they decide]. `asked`: by its kernel, so far.
void LevelCall::refuse(NoRoom why, std::size_t asked) {
  bool in_kernel = false;
  if (is_metered_ && makes_on_allocator_that_asks() && !facts_.dynamic_shape) {
    need_.certain_bytes = infer_outputs(op_, facts_, arguments());
  }
  try {
    require_room();
    in_kernel = asked > need_.certain_bytes;
    if (asked > 0 && !in_kernel) {
      why.smallest_budget += need_.certain_bytes - asked;
      why.table->note_need(why.smallest_budget);
    }
  } catch (const NoRoom& by_itself) {
    why = by_itself;
  }
  const ObservedCall refused = refused_call();
  raise_budget_error(why, name(), in_kernel ? nullptr : &refused, in_kernel);
}

Ref<Version> LevelCall::copy_of(const FoundTensor& f) const {
  for (const Saved& saved : saved_) {
    if (found_[saved.operand].storage == f.storage) return Ref<Version>(saved.version);
  }
  return {};
}

Ref<Version> LevelCall::find_overwritten(std::size_t operand) {
  const FoundTensor& f = found_[operand];
  if (f.cell != nullptr && f.cell->version->outside == nullptr) return f.cell->version;
  if (Ref<Version> copied = copy_of(f)) return copied;
  TensorVersion* known =
      domain_.outside.known(*f.storage, bumps_so_far(invocation_, found_, *f.storage));
  const bool is_observed = domain_.observers.see_calls();
  const bool is_input = is_recorded_ && operand < inputs_;
  if (known == nullptr && f.cell == nullptr && (is_input || is_observed)) {
    return domain_.outside.version_of(*f.tensor);
  }
  return Ref<Version>(known);
}

Ref<Version> LevelCall::find_outside(std::size_t operand) {
  const FoundTensor& f = found_[operand];
  if (Ref<Version> copied = copy_of(f)) return copied;
  if (f.tensor->is_wrapped_number()) return number_version(*f.tensor);
  return domain_.outside.version_of(*f.tensor);
}

void LevelCall::note_not_copied(std::size_t operand) {
  domain_.outside.note_write(*found_[operand].storage);
}

Ref<Operation> LevelCall::make_operation() { return Ref<Operation>(new Call(call_template())); }

void LevelCall::take_inputs() {
  for (std::size_t i = 0; i < inputs_; ++i) {
    const FoundTensor& f = found_[i];
    Ref<Version> version = copy_of(f);
    if (!version) version = Ref<Version>(operands_[i].version);
    if (!version && f.tensor->is_wrapped_number()) version = number_version(*f.tensor);
    if (!version) {
      version = domain_.outside.version_of(*f.tensor, !facts_.reads_shapes_only);
    } else if (f.cell != nullptr && f.cell->version->outside != nullptr) [[unlikely]] {
      domain_.outside.note_read(*f.cell->version, *f.tensor);
    }
    call().take_input(std::move(version));
    auto& input = static_cast<TensorVersion&>(*call().inputs[i].version);
    if (input.readings) [[unlikely]] input.note_reader(call(), i);
  }
  if (facts_.draws_random || facts_.may_draw) [[unlikely]] note_generator();
}

// Note [Whether an untagged operator draws is observed]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Operators of other libraries draw random numbers and lack the tag that says so: a replay that does not
// restore the generator would draw others. So the state of their device's default generator is taken before
// each first run, and belongs to the call if the run has moved it. On an accelerator the CPU's default
// generator is observed as well, and as a call restores one generator, what has moved that one is kept. In a
// capture no generator can be asked: results are kept there, but for compiled pieces, which hold no such
// operator on an accelerator. Such a draw takes no turn (Note [Random operators take turns]).
void LevelCall::note_generator() {
  try {
    call().random = std::make_shared<const RandomState>(generator());
  } catch (const c10::Error&) {
    if (facts_.draws_random) throw;  // a device may lack a generator
  }
}

void LevelCall::run_kernel() {
  if (facts_.communicates) [[unlikely]] {
    keep_arguments();
    note_communicated(true);
  }
  for (const FoundTensor& f : found_) {
    input_bytes_ += view_bytes(*f.tensor);
    if (!f.written) continue;
    domain_.outside.expect_bump(*f.tensor);
    if (is_bounded_ && (f.cell == nullptr || f.cell->version->outside != nullptr)) {
      static_cast<Level&>(*domain_.root).written_outside.insert(f.storage);
    }
  }
  if (on_accelerator_) {
    for (const FoundTensor& f : found_) domain_.streams.note_use(*f.storage);
  }
  const std::uint64_t failed = failed_allocations();
  const bool may_draw = operation_ && facts_.may_draw;
  std::optional<RandomState> of_cpu;
  if (may_draw && on_accelerator_) [[unlikely]] of_cpu.emplace(at::detail::getDefaultCPUGenerator());
  try {
    run_measured();
  } catch (...) {
    if (writes_) note_failed_write();
    throw;
  }
  if (may_draw && call().random && !call().random->has_moved()) [[unlikely]] call().random.reset();
  // See Note [What found no memory may have taken another way]
  if (failed != failed_allocations() || (of_cpu && of_cpu->has_moved())) [[unlikely]] operation_.reset();
  // See Note [A thread takes over torch's number of threads]
  if (operation_ && !call().call_template->settings.has_threads()) {
    call().call_template = Ref<CallTemplate>(new CallTemplate(*call().call_template));
  }
  if (facts_.ends_work) [[unlikely]] note_communicated(false);
}

void LevelCall::run_measured() {
  const bool is_timed_there = level_.timed && on_accelerator_;
  std::optional<c10::Event> begun;
  if (is_timed_there) begun = begin_to_time();
  const auto start = level_.timed ? std::chrono::steady_clock::now()
                                  : std::chrono::steady_clock::time_point();
  if (!facts_.is_view) [[likely]] {
    // Without a budget it is counted, and may have what it likes.
    const auto refused = [&](const NoRoom& why, std::size_t asked) { refuse(why, asked); };
    const Meter meter(level_, is_metered_ ? granted_ : kNoBudget / 2, refused);
    run_until_it_fits();
    peak_ = meter.peak();
  } else {
    run_until_it_fits();
  }
  if (is_timed_there) {
    seconds_ = seconds_since(begun);
  } else if (level_.timed) {
    seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
}

}  // namespace rematfn
