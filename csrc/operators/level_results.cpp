// SPDX-License-Identifier: Apache-2.0
//
// level_results.cpp: the second half of an operator's journey: what its results are to the level.

#include <algorithm>

#include "operators/kernels_above.h"
#include "operators/level_call.h"
#include "tensors/layers.h"
#include "tensors/stack_utils.h"

namespace rematfn {
namespace {

// Note [Some tensors are objects]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// torch hands out C++ objects as tensors: the handle of `_record_function_enter`, weights that fbgemm has
// packed. What such a storage has instead of bytes is the object, with a deleter that tells its type. A copy
// of the bytes would be none, and another such object, of a replay, not the one that was handed out. So it
// stays what an operator keeps: no level's.
bool is_object(const c10::StorageImpl& storage) {
  const c10::Allocator* allocator = storage.allocator();
  const c10::DeleterFnPtr plain = allocator == nullptr ? nullptr : allocator->raw_deleter();
  const c10::DataPtr& bytes = storage.data_ptr();
  const bool is_foreign = plain != nullptr && bytes.get_deleter() != plain;
  return is_foreign && bytes.get() != nullptr && bytes.get() == bytes.get_context();
}

}  // namespace

bool put_handle_on(c10::TensorImpl& tensor, const FoundTensors& found) {
  const c10::StorageImpl* storage = tensor.unsafe_storage().unsafeGetStorageImpl();
  for (const FoundTensor& f : found) {
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

// Puts handles on results that stand on an argument's storage; the others are fresh. Whether an
// output aliases an argument is read off the storage, never off the schema.
// See Note [Which key we borrow]: view kernels copy the key, not the handle.
void LevelCall::sort_results() {
  if (facts_.changes_metadata) [[unlikely]] {
    // `x.set_(y)` moved x to y's storage: it is a tensor of y's cell now, or of none.
    for (const FoundTensor& f : found_) {
      if (!put_handle_on(*f.tensor, found_) && f.cell != nullptr) detach(*f.tensor);
    }
  }
  const c10::ArrayRef<c10::IValue> all = results();
  for (std::size_t i = 0; i < all.size(); ++i) {
    for_each_tensor(all[i], [&](const at::Tensor& tensor, int index) {
      c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
      if (!is_plain(*impl)) {
        has_parts_ = true;
        if (has_level_key(*impl)) detach(*impl);
        return;
      }
      if (put_handle_on(*impl, found_)) return;
      add(fresh_, *impl, i, index);
    });
    if (all[i].isTensor()) continue;
    has_objects_ |= all[i].isObject() || all[i].isCapsule() || all[i].isPyObject();
    has_parts_ |= has_objects_;
  }
}

// Level tensors that have become parts of a result. The last step: with its part an argument's cell
// may go. See Note [Kernels above a level]
void LevelCall::give_away_parts() {
  if (!has_parts_) [[likely]] return;
  if (has_objects_ && !facts_.communicates) {
    for (const FoundTensor& f : found_) {
      if (Cell* cell = cell_of(*f.tensor)) give_away(*cell, *f.tensor);
    }
  }
  const auto visit = [&](const at::Tensor& part) {
    if (!part.defined() || !is_plain(*part.unsafeGetTensorImpl())) return;
    c10::TensorImpl& impl = *part.unsafeGetTensorImpl();
    Cell* cell = cell_of(impl);
    for (const FoundTensor& f : found_) {  // a nested tensor's buffer has no handle
      const bool is_its = f.storage == impl.unsafe_storage().unsafeGetStorageImpl();
      if (cell == nullptr && is_its) cell = cell_of(*f.tensor);
    }
    if (cell != nullptr) give_away(*cell, impl);
  };
  for (const c10::IValue& value : results()) {
    for_each_tensor(value, [&](const at::Tensor& tensor, int) { for_each_part(tensor, visit); });
  }
}

void LevelCall::give_away(Cell& cell, c10::TensorImpl& tensor) {
  Version* version = cell.version.get();
  domain_.materialize({&version, 1});
  domain_.make_outside(*cell.version);
  detach(tensor);
}

void LevelCall::take_results() {
  // A kernel that is above us (Note [Kernels above a level]) may have written by operators of its own.
  for (std::size_t i = 0; writes_ && i < found_.size(); ++i) {
    if (found_[i].cell != nullptr) operands_[i].version = found_[i].cell->version.get();
  }
  sort_results();
  const auto owners = [&](const FoundTensor& fresh) {
    return static_cast<std::size_t>(std::ranges::count(fresh_, fresh.storage, &FoundTensor::storage));
  };
  std::int64_t elements = 0;
  for (const FoundTensor& fresh : fresh_) {
    output_bytes_ += fresh.storage->nbytes();
    elements = std::max(elements, fresh.tensor->numel());
    if (!fresh.tensor->is_cpu()) enter_stream(fresh.tensor->device());
  }
  std::size_t written_bytes = 0;
  for (std::size_t i = 0; writes_ && i < found_.size(); ++i) {
    const FoundTensor& f = found_[i];
    if (!f.written) continue;
    written_bytes += view_bytes(*f.tensor);
    elements = std::max(elements, f.tensor->numel());
    if (f.cell != nullptr && f.storage->nbytes() > f.cell->version->nbytes) {
      output_bytes_ += f.storage->nbytes() - f.cell->version->nbytes;
    }
  }
  const std::size_t scratch_bytes = peak_ > output_bytes_ ? peak_ - output_bytes_ : 0;
  const double flops = facts_.work == Work::kBytes ? 0 : flops_of(facts_, arguments(), elements);
  const double modelled = cost_of(flops, input_bytes_ + output_bytes_ + written_bytes);
  const double cost = level_.timed ? std::max(seconds_, kOperatorCost) : modelled;
  account({.cost = cost,
           .modelled = modelled,
           .flops = flops,
           .output_bytes = output_bytes_,
           .scratch_bytes = scratch_bytes},
          peak_);
  if (operation_) [[likely]] operation_->scratch_bytes += call().bytes_aside();
  for (std::size_t i = 0; writes_ && i < found_.size(); ++i) {
    if (found_[i].written && found_[i].cell != nullptr) record_write(i);
  }
  for (const FoundTensor& fresh : fresh_) {  // See Note [Some tensors are objects]
    // Somebody else's storage: an operator handed out a tensor that it keeps.
    const bool is_shared = holders_of(*fresh.storage) != owners(fresh);
    if (!is_shared && !is_object(*fresh.storage)) [[likely]] record_fresh(fresh);
  }
  const std::size_t took = output_bytes_ + scratch_bytes;
  if (is_metered_ && took >= need_.certain_bytes && took != need_.likely_bytes) footprint_of(footprint_key()).nbytes = took;
}

double LevelCall::cost_of(double flops, std::size_t bytes_moved) const {
  if (draws_on_cpu_ || (fresh_.empty() && found_.empty())) {
    return modelled_cost(flops, bytes_moved, c10::DeviceType::CPU, /*itemsize=*/0, draws_on_cpu_);
  }
  const c10::TensorImpl& tensor = fresh_.empty() ? *found_[0].tensor : *fresh_[0].tensor;
  return modelled_cost(flops, bytes_moved, tensor.device_type(), tensor.itemsize(), /*draws=*/false);
}

void LevelCall::record_write(std::size_t argument) {
  const FoundTensor& f = found_[argument];
  const Ref<TensorVersion> old = f.cell->version;
  const bool again = std::any_of(
      found_.begin(), found_.begin() + static_cast<std::ptrdiff_t>(argument),
      [&](const FoundTensor& other) { return other.written && other.cell == f.cell; });
  if (again) return;
  if (old->outside != nullptr) return;  // the caller's bytes, before and after

  const Ref<TensorVersion> contents(new TensorVersion);
  contents->nbytes = f.storage->nbytes();
  const auto over = static_cast<std::int32_t>(argument);
  const bool replayable = begin(*contents, over);
  // What a storage is grown by may be filled by address: Note [Uninitialised memory is kept].
  contents->raw = facts_.resizes_storage && nature_.replayable;
  contents->capture.side = domain_.side_of_captures(f.tensor->device());
  contents->savers = old->savers;  // of the same tensors
  if (replayable) record_result(*contents, {static_cast<std::uint16_t>(argument), -1, true}, *f.tensor);
  contents->enter(c10::intrusive_ptr<Cell>::reclaim_copy(f.cell));
  f.cell->version = contents;
  admit(contents, over);
  if (old->readings) contents->note_address_of(*old);
  if (old->capture.side != contents->capture.side) keep_for_graph(*contents);
}

// The program's tensor has its bytes yet, and lineage a copy of them.
void LevelCall::note_not_written(std::size_t argument) {
  operation_.reset();
  record_write(argument);
}

// A kernel that raises may have written a part: what is there now nobody can replay.
void LevelCall::note_failed_write() {
  observe_failure();
  operation_.reset();
  for (std::size_t i = 0; i < found_.size(); ++i) {
    const FoundTensor& f = found_[i];
    if (f.cell == nullptr) continue;
    operands_[i].version = f.cell->version.get();
    if (f.written) record_write(i);
  }
}

void LevelCall::record_fresh(const FoundTensor& fresh) {
  c10::TensorImpl& tensor = *fresh.tensor;
  for (const FoundTensor& earlier : fresh_) {
    if (earlier.tensor == &tensor) [[likely]] break;
    if (earlier.storage != fresh.storage) continue;
    attach(tensor, c10::intrusive_ptr<Cell>::reclaim_copy(cell_of(*earlier.tensor)));
    return;
  }
  Ref<TensorVersion> contents(new TensorVersion);
  contents->nbytes = fresh.storage->nbytes();
  contents->capture.side = domain_.side_of_captures(tensor.device());
  const bool replayable = begin(*contents, kFresh);
  contents->savers.add(saver_);
  if (replayable && level_.verify && facts_.leaves_raw && !fills_uninitialised_memory()) [[unlikely]] {
    fill_with_zeros(tensor.storage());
    call().gives_zeros = true;
  }
  if (replayable) [[likely]] record_result(*contents, {fresh.position, fresh.index, false}, tensor);
  attach(tensor, make_cell(level_, contents, tensor.storage()));
  admit(contents, kFresh);
  hold_if_asked(contents, tensor.dtype());
}

void LevelCall::record_result(TensorVersion& contents, OutputPlace place,
                              c10::TensorImpl& tensor) {
  const bool specified =
      (facts_.unspecified & (place.written ? ~0U : 1U << place.position)) == 0;
  if (!level_.verify || !specified) [[likely]] return call().add_result(contents, place, nullptr);
  const at::Tensor result(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(&tensor));
  call().add_result(contents, place, &result);
}

}  // namespace rematfn
