// SPDX-License-Identifier: Apache-2.0
#include "tensors/context_layout.h"

#include <new>
#include <unordered_map>
#include <utility>

namespace rematfn {
namespace {

using PrecisionKey = std::pair<at::Float32Backend, at::Float32Op>;
using Precisions = std::unordered_map<PrecisionKey, at::Float32Precision, c10::hash<PrecisionKey>>;

// A private member may be named where a template is instantiated explicitly.
bool at::Context::*first_setting();
Precisions at::Context::*precisions();
bool at::NoTF32Guard::*changed();
template <auto first, auto precision, auto changes>
struct PrivateMembers {
  friend bool at::Context::*first_setting() { return first; }
  friend Precisions at::Context::*precisions() { return precision; }
  friend bool at::NoTF32Guard::*changed() { return changes; }
};
template struct PrivateMembers<&at::Context::enabled_cudnn, &at::Context::fp32_precision,
                               &at::NoTF32Guard::changed>;

ContextParts find_parts(at::Context& context) {
  auto* begin = reinterpret_cast<std::byte*>(&(context.*first_setting()));
  auto* end = reinterpret_cast<std::byte*>(&(context.*precisions()));
  ContextParts parts{{begin, end}, {}};
  for (auto& [key, value] : context.*precisions()) {
    parts.precisions.push_back({key.first, key.second, &value});
  }
  return parts;
}

}  // namespace

const ContextParts& parts_of_context() {
  static const auto& parts = *new ContextParts(find_parts(at::globalContext()));
  return parts;
}

void set_without_tf32(bool on) {
  alignas(at::NoTF32Guard) std::byte place[sizeof(at::NoTF32Guard)];
  auto& guard = *new (place) at::NoTF32Guard;  // not destroyed, it leaves the mark
  if (on) return;
  guard.*changed() = true;
  guard.~NoTF32Guard();
}

void set_in_backward(bool on) {
  alignas(at::ROCmBackwardPassGuard) std::byte place[sizeof(at::ROCmBackwardPassGuard)];
  auto& guard = *new (place) at::ROCmBackwardPassGuard;
  if (!on) guard.~ROCmBackwardPassGuard();
}

}  // namespace rematfn
