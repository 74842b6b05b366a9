// SPDX-License-Identifier: Apache-2.0
#include "planning/simulation.h"

#include <algorithm>

#include "base/pool.h"
#include "engine/domain.h"
#include "engine/guide.h"

namespace rematfn {
namespace {

struct SimulatedVersion final : Version, Pooled<SimulatedVersion> {};

Sizes sizes;

class SimulatedDomain final : public Domain {
 public:
  SimulatedDomain() : Domain(sizes) {}

  Effort* effort = nullptr;

  // An operator, or a replay of one.
  void note_effort() {
    if (effort == nullptr) return;
    if (effort->stop.load(std::memory_order_relaxed)) throw Stopped{};
    effort->operators.fetch_add(1, std::memory_order_relaxed);
  }
};

struct SimulatedOperation final : Operation, Pooled<SimulatedOperation> {
  explicit SimulatedOperation(const Trace::Call& call) : call(call) {}
  [[nodiscard]] std::string_view name() const override { return call.name; }
  [[nodiscard]] bool writes(std::size_t input) const override { return call.reads[input].written; }

  // See Note [A replay writes to copies]
  void replay(Domain& domain) override {
    static_cast<SimulatedDomain&>(domain).note_effort();
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      Version& version = *inputs[i].version;
      if (writes(i) && version.may_be_overwritten()) domain.leave(version);
    }
    for (Version* output : outputs) {
      if (output != nullptr && output->must_be_replayed() && Replayer::is_wanted(*output)) {
        domain.arrive(*output);
      }
    }
  }

  [[nodiscard]] std::size_t replay_bytes() const override {
    std::size_t sum = output_bytes + scratch_bytes;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const Version& version = *inputs[i].version;
      if (writes(i) && !version.may_be_overwritten()) sum += version.nbytes;
    }
    return sum;
  }

  const Trace::Call& call;
};

class Simulation {
 public:
  Simulation(const Trace& trace, const SimulationOptions& options)
      : trace_(trace),
        options_(options),
        domain_(std::make_shared<SimulatedDomain>()),
        table_(new Table(domain_, nullptr, options.budget, options.score)),
        level_(table_),
        versions_(trace.values.size()) {
    table_->keeping = options.keeping;
    table_->judge = options.judge;
    if (!options.ways.empty()) table_->let_go_by(options.ways);
    domain_->guide = options.guide;
    domain_->effort = options.effort;
    domain_->floor = options.floor;
  }

  Statistics run() {
    for (std::size_t i = 0; i < versions_.size(); ++i) {
      if (trace_.values[i].counted) continue;
      versions_[i] = Ref<Version>(new SimulatedVersion);
      versions_[i]->nbytes = trace_.values[i].nbytes;
      versions_[i]->program = true;
    }
    for (const Trace::Event& event : trace_.events) {
      const DomainLock lock(domain_);
      if (table_->statistics.replayed_cost > options_.most_replayed_cost) break;
      switch (event.what) {
        case Trace::What::kCall:
          if (options_.inner && event.index == options_.inner->first_call) enter();
          run_call(trace_.calls[event.index]);
          if (options_.inner && event.index == options_.inner->last_call) leave();
          break;
        case Trace::What::kRelease:
          domain_->release(std::move(versions_[event.index]), table_, &Store::no_bytes);
          break;
        case Trace::What::kSeal:
          seal(*versions_[event.index]);
          break;
        case Trace::What::kSettle:
          versions_[event.index]->raw = false;
          if (versions_[event.index]->producer) domain_->cut(*versions_[event.index]);
          break;
        case Trace::What::kMark:
          mark(trace_.marks[event.index]);
          break;
        case Trace::What::kUnrecorded:
          table_->unrecorded_bytes = trace_.unrecorded[event.index];
          domain_->make_room(*table_, 0);
          table_->note_peak(0);
          break;
      }
      if (!options_.check) continue;
      table_->check();
      level_->check();
    }
    return table_->statistics;
  }

 private:
  using PinnedVersions = c10::SmallVector<Ref<Version>, 6>;

  void enter() {
    const InnerLevel& inner = *options_.inner;
    level_ = Ref<Table>(new Table(domain_, table_.get(), inner.budget, options_.score));
    level_->keeping = options_.keeping;
    if (!inner.ways.empty()) level_->let_go_by(inner.ways);
  }

  // What the level has made is the outermost's from now on.
  void leave() {
    while (level_->oldest != nullptr) level_->give(*level_->oldest, *table_);
    table_->statistics.evictions += level_->statistics.evictions;
    table_->statistics.replays += level_->statistics.replays;
    table_->statistics.replayed_cost += level_->statistics.replayed_cost;
    level_ = table_;
  }

  void run_call(const Trace::Call& call) {
    domain_->note_effort();
    domain_->thrash.enter(call.backward);
    const std::size_t granted = call.output_bytes + call.scratch_bytes;
    foresee(call, granted);
    // Taken down now, before writes put other versions in the places of these.
    ObservedCall seen(call.name, call);
    for (const Trace::Read& read : call.reads) {
      seen.reads.push_back({versions_[read.value], read.written});
    }
    PinnedVersions pinned;
    const std::size_t copied_bytes = save_what_is_overwritten(call, pinned);
    c10::SmallVector<Version*, 6> wanted;
    for (const Trace::Read& read : call.reads) {
      if (versions_[read.value]->table) wanted.push_back(versions_[read.value].get());
    }
    domain_->materialize({wanted.data(), wanted.size()});
    for (Version* version : wanted) {
      pin(*version);
      pinned.emplace_back(version);
    }

    Ref<SimulatedOperation> operation;
    if (call.replayable) {
      operation = Ref<SimulatedOperation>(new SimulatedOperation(call));
      operation->table = level_;
      operation->order = domain_->next_order++;
      operation->cost = call.cost;
      operation->flops = call.flops;
      operation->output_bytes = call.output_bytes;
      operation->scratch_bytes = call.scratch_bytes;
      ++domain_->live_operations;
      operation->inputs.reserve(call.reads.size());
      for (const Trace::Read& read : call.reads) {
        operation->add_input(versions_[read.value]);
      }
    }
    domain_->make_room(*level_, granted + copied_bytes);
    level_->note_peak(granted);
    domain_->clock += call.cost;
    ++table_->statistics.operators;
    table_->statistics.base_cost += call.cost;
    table_->statistics.base_flops += call.flops;
    for (Version* version : wanted) {
      version->consumed = true;
      touch(*version, domain_->clock);
    }
    for (const Trace::Made& made : call.makes) {
      seen.makes.push_back({make(call, made, operation, pinned), made.over});
    }
    domain_->note_call(seen);
    for (const Trace::Made& made : call.makes) {
      // The old contents live on only as lineage, if at all.
      if (made.over >= 0) versions_[call.reads[made.over].value].reset();
    }
    for (const Ref<Version>& version : pinned) unpin(*version);
    domain_->trim_if_long();
    domain_->make_room(*level_, 0);
    if (options_.evict_everything) domain_->evictor.evict_all(*table_);
  }

  void mark(const Trace::Mark& mark) {
    Version& version = *versions_[mark.value];
    if (version.table) version.table->mark(version, mark.name);
  }

  // See Note [Before, not after]
  void foresee(const Trace::Call& call, std::size_t granted) {
    const auto is_within = [](const Table* t, const Table* whole) {
      while (t != nullptr && t != whole) t = t->enclosing.get();
      return t != nullptr;
    };
    for (Table* t = level_.get(); t != nullptr; t = t->enclosing.get()) {
      std::size_t inputs = 0;
      for (std::size_t i = 0; i < call.reads.size(); ++i) {
        const Version* version = versions_[call.reads[i].value].get();
        const auto earlier = call.reads.begin() + static_cast<std::ptrdiff_t>(i);
        const bool counted_before = std::any_of(
            call.reads.begin(), earlier,
            [&](const Trace::Read& r) { return versions_[r.value].get() == version; });
        if (is_within(version->table.get(), t) && !counted_before) inputs += version->nbytes;
      }
      const std::size_t needed = inputs + granted;
      t->statistics.min_budget = std::max(t->statistics.min_budget, needed);
      if (needed > t->budget) throw NoRoom{t, needed, inputs};
    }
  }

  // See Note [Mutation is a new version]
  // Returns the bytes whose old and new contents both count.
  std::size_t save_what_is_overwritten(const Trace::Call& call, PinnedVersions& pinned) {
    std::size_t copied_bytes = 0;
    for (const Trace::Read& read : call.reads) {
      const Ref<Version> version = versions_[read.value];
      if (!read.written || version->producer || !version->program) continue;
      if (!call.replayable && version->readers == nullptr) continue;
      Version* overwritten = version.get();
      if (version->table) domain_->materialize({&overwritten, 1});
      pin(*version);
      pinned.push_back(version);
      domain_->make_room(*level_, version->nbytes);
      if (version->table) copied_bytes += version->nbytes;
      if (version->table) version->table->expel(*version);
      version->program = false;
      level_->admit(*version);
    }
    return copied_bytes;
  }

  Ref<Version> make(const Trace::Call& call, const Trace::Made& made,
                    const Ref<SimulatedOperation>& operation, PinnedVersions& pinned) {
    const Ref<Version> contents(new SimulatedVersion);
    contents->nbytes = trace_.values[made.value].nbytes;
    contents->last_access = domain_->clock;
    contents->program = true;
    contents->raw = call.raw && made.over < 0;
    contents->backward = call.backward;
    contents->kept = level_->keeping.unmarked(work_of(call.name), call.backward);
    bool replayable = static_cast<bool>(operation);
    if (made.over >= 0) {
      Version& old = *versions_[call.reads[made.over].value];
      contents->consumed = old.consumed;
      contents->kept |= old.kept && level_->keeping.written();
      const bool saved = !old.producer && !old.program;
      replayable = replayable && (old.producer || saved);
      if (!saved) {
        old.program = false;
        old.table->let_go(old);
        domain_->leave(old);
      }
    }
    if (replayable) operation->add_output(*contents);
    level_->admit(*contents);
    if (made.over >= 0) {
      pin(*contents);
      pinned.push_back(contents);
    }
    versions_[made.value] = contents;
    return contents;
  }

  void seal(Version& version) {
    if (!version.table) return;
    Version* wanted = &version;
    if (version.place != Place::kHere) domain_->materialize({&wanted, 1});
    if (version.producer) domain_->cut(version);
    version.table->expel(version);
    version.program = false;
  }

  const Trace& trace_;
  const SimulationOptions options_;
  const std::shared_ptr<SimulatedDomain> domain_;
  const Ref<Table> table_;  // the outermost
  Ref<Table> level_;        // the innermost
  std::vector<Ref<Version>> versions_;
};

}  // namespace

Statistics simulate(const Trace& trace, const SimulationOptions& options) {
  return Simulation(trace, options).run();
}

}  // namespace rematfn
