// SPDX-License-Identifier: Apache-2.0
//
// level_on_device.cpp: what an operator's journey takes more on an accelerator: streams, captures, times, and
// what happens if the device has no memory.
//
// Note [An accelerator is timed once]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// The host's clock tells how long it takes to enqueue a kernel. To know how long the kernel takes, two
// events are recorded around it, and the second is waited for: then nothing overlaps. So a call is
// timed twice, of which the first may load the kernel or choose it, and calls that are alike are taken to
// take as long. From then on nobody waits.

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "base/errors.h"
#include "base/interpreter.h"
#include "levels/device_memory.h"
#include "operators/level_call.h"
#include "operators/raw_access.h"
#include "tensors/stack_utils.h"
#include "tensors/thread_keys.h"
#include "tensors/torch_compat.h"

namespace rematfn {

// The generator a random operator draws from: the one passed in, else its device's own.
at::Generator LevelCall::generator() const {
  c10::Device device(c10::kCPU);
  for (const c10::IValue& value : arguments()) {
    if (value.isGenerator()) return value.toGenerator();
    if (value.isDevice()) device = value.toDevice();
    for_each_tensor(value, [&](const at::Tensor& tensor, int) {
      if (!tensor.is_cpu()) device = tensor.device();
    });
  }
  return at::globalContext().defaultGenerator(device);
}

c10::Device LevelCall::accelerator() const {
  const auto is_on_cpu = [](const FoundTensor& f) { return f.tensor->device().is_cpu(); };
  return std::ranges::find_if_not(found_, is_on_cpu)->tensor->device();
}

void LevelCall::enter_stream(c10::Device device) {
  if (device == entered_) return;
  entered_ = device;
  domain_.streams.enter(device);
}

void LevelCall::note_accelerator(c10::Device device) {
  domain_.was_in_backward = torch::autograd::get_current_graph_task_id() >= 0;
  asks_for_room_ = asks_for_room(device.type());
  if (asks_for_room_ && is_metered_) warm_libraries(device);
}

void LevelCall::enter_stream_of_generator() {
  const c10::Device device = generator().device();
  draws_on_cpu_ = device.is_cpu();
  if (!draws_on_cpu_) enter_stream(device);
}

// See Note [A captured call keeps to itself]
void LevelCall::enter_capture() {
  const bool is_on_device = on_accelerator_ || found_.empty();
  check_replay(!level_.verify || !is_on_device, "`verify=True` reads back what operators have given, which is there "
                                                "only while the graph runs. Capture a function without it");
  // See Note [Whether an untagged operator draws is observed]
  const bool may_draw = facts_.may_draw && !op_.schema().name().starts_with("rematfn::");
  if ((facts_.draws_random && !draws_on_cpu_) || (may_draw && is_on_device)) nature_.replayable = false;
  domain_.enter_capture();
  for (const FoundTensor& f : found_) {
    if (f.cell == nullptr || !f.cell->version->is_here()) continue;
    if (!domain_.is_on_this_side(*f.cell->version)) keep_for_graph(*f.cell->version);
    if (!facts_.is_view) domain_.check_side(*f.cell->version);
  }
}

void LevelCall::keep_for_graph(TensorVersion& version) {
  domain_.note_addressed(version);
  keep_contents(domain_, version);
}

// See Note [An operator that found no memory runs again]
void LevelCall::run_until_it_fits() {
  // Where the allocator asks, the allocation is tried again; in a capture, what has drawn cannot draw again.
  const bool is_tried_once = !found_.empty() && (!on_accelerator_ || asks_for_room_);
  if (is_tried_once || domain_.streams.is_captured()) return invocation_.run_below();
  run_until_device_has_room();
}

void LevelCall::run_until_device_has_room() {
  if (writes_ && facts_.makes_fresh) reserve();
  std::shared_ptr<const RandomState> random;
  if (operation_) {
    random = call().random;
  } else if (facts_.draws_random) {
    random = std::make_shared<const RandomState>(generator());
  }
  for (;;) {
    try {
      return invocation_.run_below();
    } catch (const c10::OutOfMemoryError&) {
      if (writes_ || !domain_.evict_after_failure(std::max(granted_, input_bytes_))) throw;
      if (random) random->restore();
    }
  }
}

// Sees to it that an accelerator has the bytes that are foreseen.
void LevelCall::reserve() {
  const std::size_t nbytes = (is_metered_ ? need_ : foresee()).likely_bytes;
  const c10::Device device = accelerator();
  const BackendScope scope;
  for (;;) {
    try {
      at::empty({static_cast<std::int64_t>(nbytes)}, at::TensorOptions(device).dtype(at::kByte));
      return;
    } catch (const c10::OutOfMemoryError&) {
      if (!domain_.evict_after_failure(nbytes)) throw;
    }
  }
}

// See Note [An accelerator is timed once]
std::optional<c10::Event> LevelCall::begin_to_time() {
  constexpr int kTimes = 2;
  const c10::Device device = accelerator();
  const auto* guard = c10::impl::getDeviceGuardImpl(device.type());
  const c10::Stream stream = guard->getStream(device);
  if (footprint_of(footprint_key()).times_timed == kTimes || capture_of(*guard, stream) != 0) return std::nullopt;
  std::optional<c10::Event> begun(std::in_place, device.type(), c10::EventFlag::BACKEND_DEFAULT);
  begun->record(stream);
  return begun;
}

double LevelCall::seconds_since(const std::optional<c10::Event>& begun) {
  constexpr double kMilliseconds = 1e-3;
  Footprint& known = footprint_of(footprint_key());
  if (!begun) return known.times_timed == 0 ? 0 : known.seconds;
  const c10::Device device = accelerator();
  c10::Event end(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  end.record(c10::impl::getDeviceGuardImpl(device.type())->getStream(device));
  {
    const WithoutInterpreter scope;
    end.synchronize();
  }
  ++known.times_timed;
  return known.seconds = std::min(known.seconds, kMilliseconds * begun->elapsedTime(end));
}

}  // namespace rematfn
