// SPDX-License-Identifier: Apache-2.0
//
// level_results.cpp: the second half of an operator's journey: what its results are to the level.

#include <algorithm>

#include "levels/pressure.h"
#include "operators/kernels_above.h"
#include "operators/level_call.h"
#include "tensors/stack_utils.h"

namespace rematfn {

// Puts handles on results that stand on an argument's storage; the others are fresh. Whether an
// output aliases an argument is read off the storage, never off the schema.
// See Note [Which key we borrow]: view kernels copy the key, not the handle.
void LevelCall::sort_results() {
  if (facts_.changes_metadata) {
    // `x.set_(y)` moved x to y's storage: it is a tensor of y's cell now, or of none.
    for (const FoundTensor& f : found_) {
      if (!put_handle_on(*f.tensor) && f.cell != nullptr) detach(*f.tensor);
    }
  }
  const c10::ArrayRef<c10::IValue> all = results();
  for (std::size_t i = 0; i < all.size(); ++i) {
    for_each_tensor(all[i], [&](const at::Tensor& tensor, int index) {
      c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
      if (!is_plain(*impl)) {
        has_parts_ = true;
        return;
      }
      if (put_handle_on(*impl)) return;
      Fresh& fresh = fresh_.emplace_back();  // See Note [Records are filled in place]
      fresh.tensor = impl;
      fresh.place.position = static_cast<std::uint16_t>(i);
      fresh.place.index = index;
      fresh.place.written = false;
    });
  }
}

// Level tensors that have become parts of a sparse one. The last step: with its part an argument's
// cell may go. See Note [Kernels above a level]
void LevelCall::give_away_parts() {
  if (!has_parts_) return;
  const auto give_away = [&](const at::Tensor& part) {
    Cell* cell = cell_of(*part.unsafeGetTensorImpl());
    if (cell == nullptr) return;
    Version* version = cell->version.get();
    domain_.materialize({&version, 1});
    domain_.make_outside(*cell->version);
    detach(*part.unsafeGetTensorImpl());
  };
  for (const c10::IValue& value : results()) {
    for_each_tensor(value, [&](const at::Tensor& tensor, int) { for_each_part(tensor, give_away); });
  }
}

bool LevelCall::put_handle_on(c10::TensorImpl& tensor) {
  const c10::StorageImpl* storage = tensor.unsafe_storage().unsafeGetStorageImpl();
  for (const FoundTensor& f : found_) {
    if (f.storage != storage) continue;
    if (f.cell != nullptr) {
      attach(tensor, c10::intrusive_ptr<Cell>::reclaim_copy(f.cell));
    } else if (has_level_key(tensor)) {
      detach(tensor);
    }
    return true;
  }
  return false;
}

void LevelCall::record_results() {
  // Somebody else's storage: an operator handed out a tensor that it keeps.
  const auto owners = [&](const Fresh& fresh) {
    return static_cast<std::size_t>(
        std::count_if(fresh_.begin(), fresh_.end(), [&](const Fresh& other) {
          return other.tensor->unsafe_storage().unsafeGetStorageImpl() ==
                 fresh.tensor->unsafe_storage().unsafeGetStorageImpl();
        }));
  };
  std::int64_t elements = 0;
  for (const Fresh& fresh : fresh_) {
    output_bytes_ += fresh.tensor->unsafe_storage().nbytes();
    elements = std::max(elements, fresh.tensor->numel());
  }
  std::size_t written_bytes = 0;
  for (const FoundTensor& f : found_) {
    if (!f.written) continue;
    written_bytes += view_bytes(*f.tensor);
    elements = std::max(elements, f.tensor->numel());
    if (f.cell != nullptr && f.storage->nbytes() > f.cell->version->nbytes) {
      output_bytes_ += f.storage->nbytes() - f.cell->version->nbytes;
    }
  }
  const std::size_t scratch_bytes = peak_ > output_bytes_ ? peak_ - output_bytes_ : 0;
  level_.note_peak(peak_);
  if (peak_ > foreseen_.certain_bytes) level_.note_need(input_bytes_in(level_) + peak_);
  const double flops = flops_.total(elements);
  const double cost =
      level_.timed ? std::max(seconds_, kOperatorCost)
                   : modelled_cost(flops, input_bytes_ + output_bytes_ + written_bytes,
                                   draws_on_cpu_);
  domain_.clock += cost;
  for (Table* t = &level_; t != nullptr; t = t->enclosing.get()) {
    ++t->statistics.operators;
    t->statistics.base_cost += cost;
    t->statistics.base_flops += flops;
  }
  if (call_) {
    call_->cost = cost;
    call_->flops = flops;
    call_->output_bytes = output_bytes_;
    call_->scratch_bytes = scratch_bytes;
  }
  const bool observed = domain_.recorder || domain_.guide;
  if (observed) observe_reads(cost, flops, scratch_bytes);
  for (const FoundTensor& f : found_) {
    if (f.cell == nullptr) continue;
    f.cell->version->consumed = true;
    touch(*f.cell->version, domain_.clock);
  }
  for (std::size_t i = 0; i < found_.size(); ++i) {
    if (found_[i].written && found_[i].cell != nullptr) record_write(i);
  }
  for (const Fresh& fresh : fresh_) {
    if (fresh.tensor->unsafe_storage().use_count() == owners(fresh)) {
      record_fresh(*fresh.tensor, fresh.place);
    }
  }
  if (observed) domain_.note_call(*seen_);
  const Footprint seen{output_bytes_, scratch_bytes};
  if (metered_ && seen != foreseen_.likely) remember(signature_, facts_, seen);
}

// Taken down before writes put other versions in the places of those that were read.
void LevelCall::observe_reads(double cost, double flops, std::size_t scratch_bytes) {
  seen_.emplace(op_.schema().name(), CallFacts{.cost = cost,
                                               .flops = flops,
                                               .output_bytes = output_bytes_,
                                               .scratch_bytes = scratch_bytes,
                                               .replayable = static_cast<bool>(call_),
                                               .raw = facts_.leaves_raw,
                                               .backward = in_backward_});
  read_of_.assign(found_.size(), -1);
  for (std::size_t i = 0; i < found_.size(); ++i) {
    const FoundTensor& f = found_[i];
    Ref<Version> version;
    if (call_) {
      version = call_->inputs[i].version;
    } else if (f.cell != nullptr) {
      version = f.cell->version;
    } else {
      continue;  // neither counted nor replayed from
    }
    read_of_[i] = static_cast<std::int32_t>(seen_->reads.size());
    seen_->reads.push_back({std::move(version), f.written});
  }
}

// See Note [Mutation is a new version]
void LevelCall::record_write(std::size_t argument) {
  const FoundTensor& f = found_[argument];
  const Ref<TensorVersion> old = f.cell->version;
  const bool again = std::any_of(
      found_.begin(), found_.begin() + static_cast<std::ptrdiff_t>(argument),
      [&](const FoundTensor& other) { return other.written && other.cell == f.cell; });
  if (again) return;
  const bool saved = std::any_of(saved_.begin(), saved_.end(),
                                 [&](const Saved& s) { return s.copy.get() == old.get(); });
  if (old->outside != nullptr) return;  // the caller's bytes, before and after

  const Ref<TensorVersion> contents(new TensorVersion);
  contents->nbytes = f.storage->nbytes();
  contents->consumed = old->consumed;
  // What a storage is grown by may be filled by address: Note [Uninitialised memory is kept].
  contents->raw = facts_.resizes_storage && recordable_;
  contents->first_saver = old->first_saver;  // of the same tensors
  contents->last_saver = old->last_saver;
  note_keeping(*contents);
  contents->kept |= old->kept && level_.policy.keeping.written();
  contents->last_access = domain_.clock;
  if (!saved) {
    old->leave_cell();
    old->program = false;
    old->storage = c10::Storage();
    if (old->table) {
      old->table->hold(old->nbytes);
      old->table->let_go(*old);
    }
    domain_.leave(*old);
  }
  if (call_ && (old->producer || saved)) {
    record_result(*contents, {static_cast<std::uint16_t>(argument), -1, true}, *f.tensor);
  }
  contents->enter(c10::intrusive_ptr<Cell>::reclaim_copy(f.cell));
  if (seen_) seen_->makes.push_back({contents, read_of_[argument]});
  f.cell->version = contents;
  f.cell->level->admit(*contents);
  pin_for_call(contents);
}

void LevelCall::record_fresh(c10::TensorImpl& tensor, OutputPlace place) {
  const c10::StorageImpl* storage = tensor.unsafe_storage().unsafeGetStorageImpl();
  for (const Fresh& earlier : fresh_) {
    if (earlier.tensor == &tensor) break;
    if (earlier.tensor->unsafe_storage().unsafeGetStorageImpl() != storage) continue;
    attach(tensor, c10::intrusive_ptr<Cell>::reclaim_copy(cell_of(*earlier.tensor)));
    return;
  }
  Ref<TensorVersion> contents(new TensorVersion);
  contents->nbytes = storage->nbytes();
  contents->last_access = domain_.clock;
  contents->raw = facts_.leaves_raw;
  note_saver(*contents, saver_);
  note_keeping(*contents);
  if (call_ && level_.verify && facts_.leaves_raw && !fills_uninitialised_memory()) {
    fill_with_zeros(tensor.storage());
    call_->gives_zeros = true;
  }
  if (call_) record_result(*contents, place, tensor);
  attach_new(tensor, make_cell(level_, contents, tensor.storage()));
  level_.admit(*contents);
  hold_if_asked(contents, tensor.dtype());
  if (seen_) seen_->makes.push_back({contents, -1});
}

void LevelCall::note_keeping(Version& contents) const {
  contents.backward = in_backward_;
  contents.kept = level_.policy.keeping.unmarked(facts_.work, in_backward_);
}

void LevelCall::record_result(TensorVersion& contents, OutputPlace place,
                              c10::TensorImpl& tensor) {
  const bool specified =
      (facts_.unspecified & (place.written ? ~0U : 1U << place.position)) == 0;
  if (!level_.verify || !specified) return call_->add_result(contents, place, nullptr);
  const at::Tensor result(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(&tensor));
  call_->add_result(contents, place, &result);
}

// The operator is done and nothing is pinned: what was not foreseen is made good now.
void LevelCall::account() {
  domain_.trim_if_long();
  if (bounded_) {
    domain_.make_room(level_, 0);
  } else {
    relieve_pressure(level_, output_bytes_);
  }
  for (Table* t = &level_; t != nullptr; t = t->enclosing.get()) {
    if (t->policy.evict_everything) domain_.evictor.evict_all(*t);
  }
}

}  // namespace rematfn
