// SPDX-License-Identifier: Apache-2.0
#include "tensors/captures.h"

#include <torch/csrc/autograd/engine.h>

#include <utility>
#include <vector>

#include "base/errors.h"
#include "tensors/level_tensor.h"
#include "tensors/torch_compat.h"

namespace rematfn {

Capture::Side TensorDomain::side_of_captures(c10::Device device) const {
  if (device.is_cpu()) return Capture::Side::kNone;
  return streams.is_captured() ? Capture::Side::kInside : Capture::Side::kOutside;
}

bool TensorDomain::is_on_this_side(const TensorVersion& version) const {
  using Side = Capture::Side;
  return version.capture.side == Side::kNone || (version.capture.side == Side::kInside) == streams.is_captured();
}

// Rule 6. Of what is not known to be another capture, only another backward may be one.
std::uint64_t TensorDomain::capture_here() const {
  if (streams.capture() != kSomeCapture) return streams.capture();
  return static_cast<std::uint64_t>(torch::autograd::get_current_graph_task_id() + 1);
}

std::uint64_t TensorDomain::capture_of_return() const {
  if (!streams.is_captured()) return 0;
  return torch::autograd::get_current_graph_task_id() >= 0 ? capture_here() : 0;
}

bool TensorDomain::is_anothers(const TensorVersion& version) const {
  const std::uint64_t here = capture_here();
  const std::uint64_t brought_back = version.capture.brought_back;
  return version.is_here() && brought_back != 0 && here != 0 && brought_back != here;
}

void TensorDomain::check_side(const TensorVersion& version) const {
  const bool is_kept_for_graph =
      streams.is_captured() && version.is_addressed() && !version.producer && !version.capture.is_copy;
  if (!is_on_this_side(version) && !is_kept_for_graph) {
    const bool is_captures = version.capture.side == Capture::Side::kInside;
    check_replay(false, is_captures
                            ? "what a graph's capture made, and evicted, is there only while the graph runs. Return it "
                              "from the transformed function in the capture, call rematfn.materialize(x) there, or "
                              "raise the budget"
                            : "what was made before a graph's capture, and evicted or overwritten, is needed in it. "
                              "Capture the whole call, its backward included, call rematfn.materialize(x) before the "
                              "capture, or raise the budget");
  }
  check_replay(!streams.is_captured() || !is_anothers(version),
               "what the capture of another backward brought back is there only if its graph runs. Capture the "
               "backwards in one graph, or raise the budget");
}

void TensorDomain::enter_capture() {
  const std::uint64_t here = capture_here();
  if (std::exchange(last_capture_, here) == here) return;
  std::vector<Ref<Version>> others;
  for_each_table([&](Table& table) {
    for (Version* v = table.oldest; v != nullptr; v = v->next) {
      if (is_anothers(tensor_version(*v))) others.emplace_back(v);
    }
  });
  for (const Ref<Version>& version : others) evictor.evict_if_free(*version);
}

}  // namespace rematfn
