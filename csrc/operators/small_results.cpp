// SPDX-License-Identifier: Apache-2.0
#include "operators/small_results.h"

#include <algorithm>
#include <atomic>

#include "levels/pressure.h"
#include "tensors/stack_utils.h"

namespace rematfn {
namespace {

constexpr std::size_t kRecordBytes = 512;
std::atomic<std::size_t> record_bytes{kRecordBytes};
constexpr std::uint64_t kAskEvery = 1U << 16U;  // operators, for whether memory is short

}  // namespace

bool reads_little(const Invocation& invocation, const FoundTensors& found, Arguments kind) {
  const Level* level = current_level();
  if (level == nullptr || level->records_all) return false;
  const OperatorFacts& facts = invocation.facts;
  if (kind != Arguments::kPlain || !facts.makes_fresh || facts.draws_random ||
      facts.never_replayed || !facts.writes.empty() || !facts.training_writes.empty()) {
    return false;
  }
  const std::size_t most = record_bytes.load(std::memory_order_relaxed);
  return !found.empty() && std::all_of(found.begin(), found.end(), [&](const FoundTensor& f) {
    return f.storage->nbytes() <= most && !has_level_key(*f.tensor) &&
           cell_evicted_from(*f.storage) == nullptr && !f.tensor->requires_grad();
  });
}

bool makes_little(c10::ArrayRef<c10::IValue> results) {
  const std::size_t most = record_bytes.load(std::memory_order_relaxed);
  bool little = true;
  for (const c10::IValue& value : results) {
    for_each_tensor(value, [&](const at::Tensor& result, int) {
      const c10::TensorImpl& tensor = *result.unsafeGetTensorImpl();
      little = little && is_plain(tensor) && !has_level_key(tensor);
      if (!little) return;
      // An empty one may be there for an operator to write to, at whatever size that is.
      const std::size_t nbytes = tensor.unsafe_storage().nbytes();
      little = 0 < nbytes && nbytes <= most;
    });
  }
  return little;
}

void pass_over() {
  std::uint64_t so_far = 0;
  for (Level* level = current_level(); level != nullptr; level = level->enclosing_level()) {
    // No other thread adds to it, so this need not be one atomic addition.
    so_far = level->passed_over.load(std::memory_order_relaxed) + 1;
    level->passed_over.store(so_far, std::memory_order_relaxed);
  }
  if (so_far % kAskEvery != 0) return;
  Level& level = *current_level();
  const DomainLock lock(level.domain);
  relieve_pressure(level, kAskEvery * kRecordBytes);
}

void pretend_record_bytes(std::optional<std::size_t> nbytes) {
  record_bytes = nbytes.value_or(kRecordBytes);
}

}  // namespace rematfn
