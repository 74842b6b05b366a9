// SPDX-License-Identifier: Apache-2.0
#include "engine/trace.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace rematfn {

Trace::Id Trace::add_value(std::size_t nbytes, bool counted) {
  values.push_back({nbytes, counted});
  return static_cast<Id>(values.size() - 1);
}

void Trace::add_mark(Id value, std::string name) {
  events.push_back({What::kMark, static_cast<std::uint32_t>(marks.size())});
  marks.push_back({value, std::move(name)});
}

void Trace::add_unrecorded(std::size_t nbytes) {
  events.push_back({What::kUnrecorded, static_cast<std::uint32_t>(unrecorded.size())});
  unrecorded.push_back(nbytes);
}

void Trace::add_call(Call call) {
  events.push_back({What::kCall, static_cast<std::uint32_t>(calls.size())});
  calls.push_back(std::move(call));
}

bool Trace::is_same_program(const Trace& other) const {
  return std::ranges::equal(calls, other.calls, [](const Call& a, const Call& b) {
    return a.name == b.name && a.reads == b.reads && a.makes == b.makes;
  });
}

double Trace::cost() const {
  return std::accumulate(calls.begin(), calls.end(), 0.0,
                         [](double sum, const Call& call) { return sum + call.cost; });
}

double Trace::elapsed() const {
  return std::accumulate(calls.begin(), calls.end(), 0.0, [](double sum, const Call& call) {
    return sum + call.cost + call.pause;
  });
}

std::size_t Trace::result_bytes() const {
  std::vector<bool> left(values.size());
  std::size_t sum = 0;
  for (const auto [what, index] : events) {
    if (what != What::kSeal || !values[index].counted || left[index]) continue;
    left[index] = true;
    sum += values[index].nbytes;
  }
  return sum;
}

void Trace::check() const {
  enum class State : std::uint8_t { kUnborn, kAlive, kGone };
  std::vector<State> states;
  for (const Value& value : values) states.push_back(value.counted ? State::kUnborn : State::kAlive);
  const auto require = [](bool holds) {
    if (!holds) throw std::invalid_argument("rematfn: not a trace: a value is read before it is there, or made twice");
  };
  const auto is_alive = [&](Id value) { return value < states.size() && states[value] == State::kAlive; };
  for (const auto [what, index] : events) {
    if (what == What::kUnrecorded) continue;
    if (what != What::kCall) {
      const Id value = what == What::kMark ? marks[index].value : index;
      require(is_alive(value));
      if (what == What::kRelease) states[value] = State::kGone;
      continue;
    }
    const Call& call = calls[index];
    require(std::ranges::all_of(call.reads, is_alive, &Read::value));
    for (const auto& [made, over] : call.makes) {
      require(over < std::ssize(call.reads));
      if (over >= 0) {
        const Id before = call.reads[over].value;
        require(values[before].counted);
        states[before] = State::kGone;
      }
      require(made < states.size() && states[made] == State::kUnborn);
      states[made] = State::kAlive;
    }
  }
}

Trace::Id Recorder::id_of(Version& version, bool made) {
  if (version.recorded == kNoValue) {
    version.recorded = trace->add_value(version.nbytes, made);
    trace->values[version.recorded].packed_share = version.packed_share;
  }
  return version.recorded;
}

void Recorder::note(const ObservedCall& seen) {
  Trace::Call call(seen.name, seen);
  for (const auto& [version, written] : seen.reads) {
    call.reads.push_back({id_of(*version, false), written});
  }
  for (const auto& [version, over] : seen.makes) call.makes.push_back({id_of(*version, true), over});
  trace->add_call(std::move(call));
}

void Recorder::note(Trace::What what, const Version& version) {
  if (version.recorded == kNoValue) return;
  // What came from outside, or has left, may be read again by whoever else holds it.
  const bool goes =
      what == Trace::What::kRelease || Trace::leaves(what) || what == Trace::What::kRead;
  if (goes && !version.table) return;
  if (Trace::leaves(what) && !sealed_.insert(version.recorded).second) return;
  trace->add(what, version.recorded);
}

void Recorder::note_mark(const Version& version, const std::string& name) {
  if (version.recorded != kNoValue) trace->add_mark(version.recorded, name);
}

void Recorder::note_packed(const Version& version) {
  if (version.recorded != kNoValue) trace->values[version.recorded].packed_share = version.packed_share;
}

Trace Recorder::followed_by(const ObservedCall* refused) const {
  Trace whole = *trace;
  if (refused == nullptr) return whole;
  Trace::Call call(refused->name, *refused);
  for (const auto& [version, written] : refused->reads) {
    if (version->recorded != kNoValue) call.reads.push_back({version->recorded, written});
  }
  whole.add_call(std::move(call));
  return whole;
}

}  // namespace rematfn
