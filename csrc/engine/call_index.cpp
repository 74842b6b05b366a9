// SPDX-License-Identifier: Apache-2.0
#include "engine/call_index.h"

#include <algorithm>
#include <functional>

#include "base/golden_ratio.h"

namespace rematfn {

namespace {

std::string_view without_in_place(std::string_view name) {
  return name.ends_with('_') ? name.substr(0, name.size() - 1) : name;
}

}  // namespace

CallIndex::Kind CallIndex::kind_of(std::string_view name) {
  return std::hash<std::string_view>{}(without_in_place(name));
}

bool CallIndex::is_same_kind(std::string_view a, std::string_view b) {
  return a == b || without_in_place(a) == without_in_place(b);
}

void CallIndex::push(Kinds& kinds, Kind kind) {
  std::shift_left(kinds.begin(), kinds.end(), 1);
  kinds.back() = kind;
}

std::uint64_t CallIndex::context_of(const Kinds& kinds) {
  std::uint64_t hash = 0;
  for (const Kind kind : kinds) hash = (hash ^ kind) * kGoldenRatio + 1;
  return hash;
}

CallIndex::CallIndex(const Trace& trace) : readers_(trace.values.size()) {
  Kinds latest{};
  for (std::uint32_t i = 0; i < trace.calls.size(); ++i) {
    const Trace::Call& call = trace.calls[i];
    kinds_.push_back(kind_of(call.name));
    push(latest, kinds_.back());
    contexts_.push_back(context_of(latest));
    by_context_[contexts_.back()].push_back(i);
    for (const Trace::Read& read : call.reads) {
      std::vector<std::uint32_t>& readers = readers_[read.value];
      if (readers.empty() || readers.back() != i) readers.push_back(i);
    }
  }
}

std::span<const std::uint32_t> CallIndex::after(std::uint64_t context) const {
  const auto found = by_context_.find(context);
  if (found == by_context_.end()) return {};
  return found->second;
}

}  // namespace rematfn
