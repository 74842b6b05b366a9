// SPDX-License-Identifier: Apache-2.0
//
// call_template.h: what calls that are alike have in common.
//
// Note [Calls share a template]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// The layers of a network and the steps of a loop call the same operators on other tensors of the
// same shapes. All that a replay needs but the versions themselves (the operator, its plain arguments,
// the views that it had of its tensors, grad mode and the like) is then the same, some four hundred
// bytes. So it is written down once, as a template, and a call refers to it. The template of a
// call is found by comparing the call with the one that came next when the template before it was last
// used, and else with those that the operator's last calls had. As steps are alike, a domain that ends leaves
// its templates to one that begins.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>


#include "operators/find_level.h"
#include "operators/footprint.h"
#include "tensors/contents.h"
#include "tensors/settings.h"

namespace rematfn {

// The view that the operator had of inputs[i], for the i-th of these: argument `position` (element
// `index` of it, if a list).
struct TensorArgument {
  c10::DispatchKeySet keys;
  std::int64_t offset;
  std::size_t storage_bytes;  // See Note [What one call teaches decides no other]
  std::uint32_t geometry;  // where its sizes stand in the template's geometry, and its strides
  std::uint32_t dimensions;
  std::int32_t index;
  std::int32_t same_as;  // the first of the tensors that is this one; negative: none before it
  std::uint16_t position;
  caffe2::TypeMeta dtype;
  bool wrapped_number;
  bool written;
};

struct CallTemplate final : Node {
  CallTemplate(const Invocation& invocation, const FoundTensors& found);
  // The same, with the settings that are there now.
  explicit CallTemplate(const CallTemplate& like);
  // Whether it is the template of this call as well.
  [[nodiscard]] bool fits(const Invocation& invocation, const FoundTensors& found,
                          const Settings& now) const;
  // The argument, whose shape and dtype it gives back to these bytes.
  [[nodiscard]] at::Tensor over(const c10::Storage& storage, const TensorArgument& argument) const;
  [[nodiscard]] View view(std::size_t i) const;

  const c10::OperatorHandle op;
  const c10::DispatchKeySet keys;
  const bool selects_backend;
  const bool reads_shapes_only;
  const bool grad_mode;  // See Note [Replay restores what a kernel can see]
  const Settings& settings;
  const FootprintKey footprint_key;
  c10::SmallVector<c10::IValue, 4> arguments;  // without their tensors
  c10::SmallVector<TensorArgument, 3> tensors;
  c10::SmallVector<std::int64_t, 12> geometry;
  Ref<CallTemplate> next;  // that was used after this one last; of those that are still kept

 private:
  c10::SmallVector<std::uint16_t, 6> compared_;  // arguments other than the found tensors

  void take_arguments(c10::ArrayRef<c10::IValue> from);
  void take_tensor(const FoundTensor& found, std::int32_t same_as);
};

// The templates that calls in a domain have had of late.
class CallTemplates {
 public:
  [[nodiscard]] static CallTemplates& of(TensorDomain& domain);
  ~CallTemplates() { clear(); }
  [[nodiscard]] Ref<CallTemplate> of(const Invocation& invocation, const FoundTensors& found);

 private:
  using Latest = c10::SmallVector<Ref<CallTemplate>, 2>;  // the one that was met last comes first

  void clear();

  ska::flat_hash_map<const c10::FunctionSchema*, Latest> by_operator_;
  Ref<CallTemplate> last_;
  std::uint64_t generation_ = operator_generation();
};

}  // namespace rematfn
