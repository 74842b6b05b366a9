// SPDX-License-Identifier: Apache-2.0
#include "engine/frugal.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <iterator>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace rematfn {
namespace {

class FrugalReplayer {
 public:
  FrugalReplayer(Room& room, Table& table) : room_(room), table_(table) {}
  ~FrugalReplayer() {
    while (!frames_.empty()) leave_frame();
  }

  void replay(std::span<Version* const> wanted) {
    frames_.push_back({});
    for (Version* v : wanted) add_once(frames_.back().inputs, *v);
    while (!frames_.empty()) {
      const Frame& frame = frames_.back();
      std::vector<Version*> missing;
      std::vector<Version*> kept;
      for (const Ref<Version>& v : frame.inputs) {
        (room_.is_missing(*v) ? missing : kept).push_back(v.get());
      }
      if (missing.empty()) {
        finish_frame();
        continue;
      }
      if (Sweep all = foresee(missing, kept); all.peak <= table_.available_bytes()) {
        run(all);
        continue;
      }
      Version* first = easiest_first(missing, kept);
      if (Sweep alone = foresee({&first, 1}, {}); alone.peak <= table_.available_bytes()) {
        run(alone);
      } else if (first->must_be_replayed()) {
        enter(first->producer);
      } else {
        room_.fetch(*first);
        pin_in_frame(*first);
      }
    }
  }

 private:
  struct Sweep {
    struct Reads {
      std::size_t left = 0;
      bool to_the_end = false;
      bool pinned = false;
    };
    Reads& operator[](Version& version) {
      const auto [place, is_new] = versions.try_emplace(&version);
      if (is_new) order.push_back(&version);
      return place->second;
    }

    std::vector<Operation*> operations;  // in program order
    std::vector<Version*> order;         // in which the versions were reached: the same in every process
    std::unordered_map<Version*, Reads> versions;
    std::size_t peak = 0;  // bytes, what was resident and cannot go included
  };

  struct Frame {
    Ref<Operation> operation;          // none: the program's own
    std::vector<Ref<Version>> inputs;  // each once
    std::vector<Ref<Version>> pinned;  // of these, while the others are made
  };

  static void add_once(std::vector<Ref<Version>>& versions, Version& version) {
    if (std::ranges::find(versions, &version, &Ref<Version>::get) == versions.end()) versions.emplace_back(&version);
  }

  // It comes, or would come, from a copy.
  static bool comes_by_copy(const Version& version) {
    return version.copied_by() != nullptr || (version.is_candidate() && version.way->keeps_copy());
  }

  // The sweep that makes `missing` and keeps `kept`. With `first` given: once that is there, pinned,
  // and all that may go has gone.
  Sweep foresee(std::span<Version* const> missing, std::span<Version* const> kept, const Version* first = nullptr) {
    Sweep sweep;
    // What is lost is found out on the way, which takes a walk: then this one begins again.
    while (!reach(sweep, missing, kept, first)) sweep = {};
    std::ranges::sort(sweep.operations, {}, &Operation::order);
    sweep.peak = peak_of(sweep, first);
    if (sweep.operations.size() > lookahead_left_) throw Room::thrashing(table_);
    lookahead_left_ -= sweep.operations.size();
    room_.store.note_lookahead(sweep.operations.size());
    return sweep;
  }

  // False if another walk came between.
  bool reach(Sweep& sweep, std::span<Version* const> missing, std::span<Version* const> kept, const Version* first) {
    Walk walk(room_.walks);
    const auto visit_producer = [&](Version& version) {
      if (&version == first) return;
      if (!room_.is_missing(version) && (first == nullptr || !version.may_go())) return;
      if (!comes_by_copy(version)) walk.visit(*version.producer);
    };
    for (Version* v : missing) {
      sweep[*v].to_the_end = true;
      visit_producer(*v);
    }
    for (Version* v : kept) sweep[*v].to_the_end = true;
    for (std::size_t i = 0; i < walk.size() && walk.is_latest(); ++i) {
      for (Input& input : walk[i].inputs) {
        ++sweep[*input.version].left;
        visit_producer(*input.version);
      }
    }
    if (!walk.is_latest()) return false;
    for (std::size_t i = 0; i < walk.size(); ++i) sweep.operations.push_back(&walk[i]);
    return true;
  }

  // See Note [Frugal replays]
  [[nodiscard]] std::size_t peak_of(const Sweep& sweep, const Version* first) const {
    std::unordered_map<const Version*, std::size_t> left;
    // Of what comes and goes with the sweep; the others count throughout.
    const auto bytes_of = [&](const Version& v) {
      const bool comes_and_goes = v.has_bytes() ? v.may_go() : true;
      return &v != first && comes_and_goes && is_within(v.table.get(), table_) ? v.nbytes : 0;
    };
    std::size_t live = table_.used_bytes() - table_.evictable_bytes();
    if (first != nullptr && is_within(first->table.get(), table_)) live += first->nbytes;
    for (const auto& [version, reads] : sweep.versions) {
      left[version] = reads.left + (reads.to_the_end ? 1 : 0);
      if (version->has_bytes() && first == nullptr) live += bytes_of(*version);
    }
    std::size_t peak = live;
    std::unordered_set<const Version*> fetched;
    const auto fetch = [&](const Version& v) {
      const bool is_there = v.has_bytes() && first == nullptr;
      if (is_there || !comes_by_copy(v) || !fetched.insert(&v).second) return;
      live += bytes_of(v);
      peak = std::max(peak, live);
    };
    for (const Operation* operation : sweep.operations) {
      for (const Input& input : operation->inputs) fetch(*input.version);
      std::size_t allocated = operation->output_bytes + operation->scratch_bytes;
      std::size_t overwritten = 0;
      for (std::size_t i = 0; i < operation->inputs.size(); ++i) {
        const Version& v = *operation->inputs[i].version;
        if (!operation->writes(i)) continue;
        // See Note [A replay writes to copies]
        const bool in_place = bytes_of(v) > 0 && v.producer && !v.has_tensor && v.pending + left[&v] <= 1;
        (in_place ? overwritten : allocated) += v.nbytes;
      }
      if (is_within(operation->table.get(), table_)) peak = std::max(peak, live + allocated);
      for (const Version* output : operation->outputs) {
        if (output == nullptr || (output->has_bytes() && first == nullptr)) continue;
        if (comes_by_copy(*output)) continue;
        if (left.contains(output)) live += bytes_of(*output);
      }
      peak = std::max(peak, live - std::min(live, overwritten));
      for (const Input& input : operation->inputs) {
        if (--left[input.version.get()] == 0) live -= bytes_of(*input.version);
      }
    }
    for (Version* v : sweep.order) {
      if (sweep.versions.at(v).to_the_end) fetch(*v);
    }
    return peak;
  }

  // Runs a sweep. What it has to keep is pinned in the innermost frame.
  void run(Sweep& sweep) {
    const auto pin_in_sweep = [&](Version& version) {
      const auto place = sweep.versions.find(&version);
      if (place == sweep.versions.end() || place->second.pinned || !version.is_here()) return;
      pin(version);
      place->second.pinned = true;
    };
    const auto have = [&](Version& version) {
      if (room_.is_missing(version) && version.can_be_fetched()) room_.fetch(version);
      pin_in_sweep(version);
    };
    for (Version* version : sweep.order) pin_in_sweep(*version);
    for (Operation* operation : sweep.operations) {
      for (Input& input : operation->inputs) expect(*input.version);
    }
    std::size_t done = 0;
    const auto finish = c10::make_scope_exit([&] {
      for (Version* version : sweep.order) {
        if (sweep[*version].pinned) unpin(*version);
      }
      for (; done < sweep.operations.size(); ++done) {
        for (Input& input : sweep.operations[done]->inputs) unexpect(*input.version);
      }
    });
    while (done < sweep.operations.size()) {
      Operation& operation = *sweep.operations[done];
      for (Input& input : operation.inputs) have(*input.version);
      const auto is_lost = [](const Input& input) { return !input.version->is_here(); };
      if (std::ranges::any_of(operation.inputs, is_lost)) return;  // with its copy
      room_.replay(operation);
      ++done;
      for (Version* output : operation.outputs) {
        if (output != nullptr) pin_in_sweep(*output);
      }
      for (Input& input : operation.inputs) unexpect(*input.version);
      for (Input& input : operation.inputs) {
        Sweep::Reads& reads = sweep[*input.version];
        if (--reads.left > 0 || reads.to_the_end || !reads.pinned) continue;
        reads.pinned = false;
        unpin(*input.version);
        room_.drop_if_useless(*input.version);
      }
    }
    for (Version* version : sweep.order) {
      if (sweep[*version].to_the_end) have(*version);
    }
    for (Version* version : sweep.order) {
      if (sweep[*version].to_the_end) pin_in_frame(*version);
    }
  }

  void enter(Ref<Operation> operation) {
    Frame frame{std::move(operation), {}, {}};
    for (Input& input : frame.operation->inputs) {
      expect(*input.version);
      add_once(frame.inputs, *input.version);
    }
    frames_.push_back(std::move(frame));
  }

  void leave_frame() {
    const Frame frame = std::move(frames_.back());
    frames_.pop_back();
    for (const Ref<Version>& version : frame.pinned) unpin(*version);
    if (!frame.operation) return;
    for (Input& input : frame.operation->inputs) unexpect(*input.version);
    for (Input& input : frame.operation->inputs) room_.drop_if_useless(*input.version);
  }

  // A version whose copy was lost is not there.
  void pin_in_frame(Version& version) {
    if (!version.is_here()) return;
    pin(version);
    frames_.back().pinned.emplace_back(&version);
  }

  // The inputs of the innermost frame are there: its operation runs.
  void finish_frame() {
    const Ref<Operation> operation = frames_.back().operation;
    if (operation) room_.replay(*operation);
    leave_frame();
    if (!operation) return;
    for (const Ref<Version>& v : frames_.back().inputs) {
      if (v->is_here() && v->producer.get() == operation.get()) pin_in_frame(*v);
    }
  }

  // See Note [Frugal replays], 3
  Version* easiest_first(std::span<Version* const> missing, std::span<Version* const> kept) {
    if (missing.size() == 1) return missing.front();
    Version* easiest = nullptr;
    std::size_t least = 0;
    for (Version* v : missing) {
      std::vector<Version*> rest;
      std::ranges::remove_copy(missing, std::back_inserter(rest), v);
      const std::size_t peak = foresee(rest, kept, v).peak;
      if (easiest != nullptr && peak >= least) continue;
      easiest = v;
      least = peak;
    }
    return easiest;
  }

  Room& room_;
  Table& table_;
  std::vector<Frame> frames_;                              // the innermost last
  std::size_t lookahead_left_ = std::size_t{1} << 21;  // operations: some tenths of a second
};

}  // namespace

void replay_frugally(Room& room, Table& table, std::span<Version* const> wanted) {
  FrugalReplayer(room, table).replay(wanted);
}

}  // namespace rematfn
