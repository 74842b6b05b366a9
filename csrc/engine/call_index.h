// SPDX-License-Identifier: Apache-2.0
//
// call_index.h: where in a record a call may be found. See Note [A guide finds its place again]

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/trace.h"

namespace rematfn {

class CallIndex {
 public:
  explicit CallIndex(const Trace& trace);

  static constexpr std::size_t kContext = 4;  // calls
  // Of the calls of one operator, in place or not: autograd adds gradients up in place where it can.
  using Kind = std::uint64_t;
  // Of a call and those before it; the last comes last.
  using Kinds = std::array<Kind, kContext>;
  [[nodiscard]] static Kind kind_of(std::string_view name);
  [[nodiscard]] static bool is_same_kind(std::string_view a, std::string_view b);
  static void push(Kinds& kinds, Kind kind);
  [[nodiscard]] static std::uint64_t context_of(const Kinds& kinds);

  [[nodiscard]] Kind kind(std::size_t call) const { return kinds_[call]; }
  [[nodiscard]] std::uint64_t context(std::size_t call) const { return contexts_[call]; }
  // Numbers of calls, in order.
  [[nodiscard]] std::span<const std::uint32_t> readers_of(Trace::Id value) const {
    return readers_[value];
  }
  [[nodiscard]] std::span<const std::uint32_t> after(std::uint64_t context) const;

 private:
  std::vector<Kind> kinds_;
  std::vector<std::uint64_t> contexts_;
  std::vector<std::vector<std::uint32_t>> readers_;
  std::unordered_map<std::uint64_t, std::vector<std::uint32_t>> by_context_;
};

}  // namespace rematfn
