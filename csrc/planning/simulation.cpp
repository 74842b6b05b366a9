// SPDX-License-Identifier: Apache-2.0
#include "planning/simulation.h"

#include <algorithm>

#include "base/pool.h"
#include "engine/domain.h"
#include "engine/guide.h"
#include "engine/step.h"
#include "planning/simulated_link.h"

namespace rematfn {
namespace {

struct SimulatedVersion final : Version, Pooled<SimulatedVersion> {};

class CountingSizes final : public Store {
 public:
  explicit CountingSizes(Effort& effort) : effort_(effort) {}

  void note_lookahead(std::size_t operations) override {
    constexpr std::size_t kOfOneReplay = 8;
    if (effort_.counts_walks) effort_.note(operations / kOfOneReplay);
  }

 private:
  Effort& effort_;
};

class SimulatedDomain final : public Domain {
 public:
  SimulatedDomain(Effort& effort, const std::vector<Trace::Call>& calls)
      : Domain(sizes_), calls_(calls), effort_(effort), sizes_(effort) {}

  void note_replay(const Trace::Call& call) {
    note_effort();
    replays.push_back({event, static_cast<std::uint32_t>(&call - calls_.data())});
  }

  // An operator, or a replay of one.
  void note_effort() {
    constexpr std::uint64_t kWalksOfOneReplay = 4;
    std::uint64_t operators = 1;
    if (effort_.counts_walks) {
      operators += (walks.last - walks_before_) / kWalksOfOneReplay;
      walks_before_ = walks.last;
    }
    effort_.note(operators);
  }

  std::vector<Replayed> replays;
  std::uint32_t event = 0;  // of the trace, that is being run

 private:
  const std::vector<Trace::Call>& calls_;
  Effort& effort_;
  CountingSizes sizes_;
  std::uint64_t walks_before_ = 0;
};

struct SimulatedOperation final : Operation, Pooled<SimulatedOperation> {
  explicit SimulatedOperation(const Trace::Call& call) : call(call) {}
  [[nodiscard]] std::string_view name() const override { return call.name; }
  [[nodiscard]] bool writes(std::size_t input) const override { return call.reads[input].written; }

  // See Note [A replay writes to copies]
  void replay(Room& room) override {
    static_cast<SimulatedDomain&>(room).note_replay(call);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      Version& version = *inputs[i].version;
      if (writes(i) && may_overwrite(version)) room.note_gone(version);
    }
    for (Version* output : outputs) {
      if (output != nullptr && output->must_be_replayed() && is_wanted(*output)) {
        room.arrive(*output);
      }
    }
  }

  const Trace::Call& call;
};

using Versions = std::vector<Ref<Version>>;

Ref<Version> outside_version(std::size_t nbytes) {
  Ref<Version> version(new SimulatedVersion);
  version->nbytes = nbytes;
  version->has_tensor = true;
  return version;
}

// See Note [One journey for tensors and numbers]
class SimulatedStep final : private Step {
 public:
  SimulatedStep(SimulatedDomain& domain, Table& level, const Trace& trace, Versions& versions,
                const Trace::Call& call)
      : Step(domain, level), trace_(trace), versions_(versions), call_(call) {
    domain.note_effort();
    is_metered_ = true;
    const auto is_fresh = [](const Trace::Made& made) { return made.over < 0; };
    nature_ = {.raw = call.raw,
               .backward = call.backward,
               .work = work_of(call.name),
               .replayable = call.replayable,
               .makes_fresh = std::ranges::any_of(call.makes, is_fresh),
               .writes_aside = writes_statistics_aside(call.name)};
    operands_.resize(call.reads.size());
    for (std::size_t i = 0; i < call.reads.size(); ++i) {
      Version* version = versions[call.reads[i].value].get();
      set_operand(i, version, version->table.get(), call.reads[i].written);
    }
    count_inputs();
  }

  void run() {
    Step::run();
    finish();
  }

 private:
  [[nodiscard]] std::string_view operator_name() const override { return call_.name; }
  [[nodiscard]] bool are_on_one_storage(std::size_t operand, std::size_t other) const override {
    return call_.reads[operand].value == call_.reads[other].value;
  }

  Need foresee() override {
    const std::size_t bytes = call_.output_bytes + call_.scratch_bytes;
    return {bytes, bytes};
  }

  // What is not the program's any more is a copy already.
  Ref<Version> find_overwritten(std::size_t operand) override {
    const Ref<Version>& version = versions_[call_.reads[operand].value];
    return version->has_tensor ? version : Ref<Version>();
  }

  Ref<Operation> make_operation() override {
    return Ref<Operation>(new SimulatedOperation(call_));
  }

  void take_inputs() override {
    for (std::size_t i = 0; i < inputs_; ++i) operation_->add_input(versions_[call_.reads[i].value]);
  }

  void take_results() override {
    account(call_, granted_);
    for (std::size_t i = inputs_; operation_ && i < operands_.size(); ++i) {
      operation_->scratch_bytes += trace_.values[call_.reads[i].value].nbytes;
    }
    for (const Trace::Made& made : call_.makes) {
      const Ref<Version> contents(new SimulatedVersion);
      contents->nbytes = trace_.values[made.value].nbytes;
      contents->packed_share = trace_.values[made.value].packed_share;
      contents->has_tensor = true;
      if (begin(*contents, made.over)) operation_->add_output(*contents);
      admit(contents, made.over);
      versions_[made.value] = contents;
    }
    for (const Trace::Made& made : call_.makes) {
      // The old contents live on only as lineage, if at all.
      if (made.over >= 0) versions_[call_.reads[made.over].value].reset();
    }
    for (const Trace::Read& read : call_.reads) {
      const Trace::Value& value = trace_.values[read.value];
      if (read.written && !value.counted) versions_[read.value] = outside_version(value.nbytes);
    }
  }

  const Trace& trace_;
  Versions& versions_;
  const Trace::Call& call_;
};

class Simulation {
 public:
  Simulation(const Trace& trace, const SimulationOptions& options)
      : trace_(trace),
        options_(options),
        domain_(std::make_shared<SimulatedDomain>(options.effort != nullptr ? *options.effort : effort_, trace.calls)),
        table_(new Table(domain_, *domain_, nullptr, options.budget, options.policy)),
        level_(table_),
        versions_(trace.values.size()) {
    if (options.link) {
      moved_.resize(trace.values.size());
      const LinkOptions& link = *options.link;
      links_.push_back(std::make_unique<SimulatedLink>(*domain_, link.figures, link.room, moved_));
      if (link.packing) links_.push_back(std::make_unique<SimulatedLink>(*domain_, *link.packing, kNoBudget, moved_));
      std::vector<Way*> ways;
      if (link.drops) ways.push_back(&domain_->drop_and_replay);
      for (const auto& each : links_) ways.push_back(each.get());
      table_->evict_by(ways);
    }
    domain_->root = table_.get();
    domain_->observers.guide = options.guide;
  }

  Statistics run() {
    for (std::size_t i = 0; i < versions_.size(); ++i) {
      if (!trace_.values[i].counted) versions_[i] = outside_version(trace_.values[i].nbytes);
    }
    for (std::size_t i = 0;; ++i) {
      const DomainLock lock(domain_);
      if (options_.between) options_.between(*table_, level_);
      if (i == trace_.events.size() || table_->statistics.overhead() > options_.most_overhead) break;
      const Trace::Event& event = trace_.events[i];
      domain_->event = static_cast<std::uint32_t>(i);
      switch (event.what) {
        case Trace::What::kCall:
          SimulatedStep(*domain_, *level_, trace_, versions_, trace_.calls[event.index]).run();
          break;
        case Trace::What::kRelease:
          domain_->release(std::move(versions_[event.index]), table_, &Store::no_bytes);
          break;
        case Trace::What::kSeal:
          if (i == 0 || trace_.events[i - 1].what != event.what) bring_back_together(i);
          seal(*versions_[event.index]);
          break;
        case Trace::What::kStored:
          if (i == 0 || trace_.events[i - 1].what != event.what) as_there_is_room([&] { bring_back_together(i); });
          as_there_is_room([&] { seal(*versions_[event.index]); });
          break;
        case Trace::What::kFilled:
          keep(*versions_[event.index]);
          break;
        case Trace::What::kAddressed:
          make_constant(*versions_[event.index]);
          domain_->note_addressed(*versions_[event.index]);
          break;
        case Trace::What::kRead:
          bring_back(*versions_[event.index]);
          domain_->observers.note(Trace::What::kRead, *versions_[event.index]);
          break;
        case Trace::What::kMark: {
          const auto& [value, name] = trace_.marks[event.index];
          if (versions_[value]->table) domain_->mark(*versions_[value], name);
          break;
        }
        case Trace::What::kUnrecorded:
          domain_->note_unrecorded(*table_, trace_.unrecorded[event.index]);
          domain_->make_room(*table_, 0);
          table_->note_peak(0);
          break;
      }
    }
    return table_->statistics;
  }

  [[nodiscard]] Deeds deeds() const { return {moved_, domain_->replays}; }

 private:
  void bring_back(Version& version) {
    Version* wanted = &version;
    if (version.table) domain_->materialize({&wanted, 1});
  }

  // Resident, and a constant from now on.
  void make_constant(Version& version) {
    bring_back(version);
    if (version.producer) domain_->cut(version);
  }

  void keep(Version& version) {
    version.raw = false;
    make_constant(version);
  }

  // What leaves from that event on. See Note [Results count until the last is there]
  void bring_back_together(std::size_t event) {
    std::vector<Version*> wanted;
    const Trace::What what = trace_.events[event].what;
    for (; event < trace_.events.size() && trace_.events[event].what == what; ++event) {
      Version* version = versions_[trace_.events[event].index].get();
      if (version->table) wanted.push_back(version);
    }
    domain_->gather(wanted);
  }

  // What finds none stays the level's.
  template <class Function>
  static void as_there_is_room(const Function& leave) {
    try {
      leave();
    } catch (const NoRoom&) {
    }
  }

  void seal(Version& version) {
    if (!version.table) return;
    keep(version);
    domain_->expel(version);
    version.has_tensor = false;
  }

  const Trace& trace_;
  const SimulationOptions options_;
  Effort effort_;  // if nobody asks for it
  const std::shared_ptr<SimulatedDomain> domain_;
  std::vector<bool> moved_;
  std::vector<std::unique_ptr<SimulatedLink>> links_;
  const Ref<Table> table_;  // the outermost
  Ref<Table> level_;        // the innermost
  Versions versions_;
};

}  // namespace

Statistics simulate(const Trace& trace, const SimulationOptions& options,
                    Deeds* deeds) {
  Simulation simulation(trace, options);
  const Statistics found = simulation.run();
  if (deeds != nullptr) *deeds = simulation.deeds();
  return found;
}

}  // namespace rematfn
