// SPDX-License-Identifier: Apache-2.0
#include "domain.h"

#include <algorithm>
#include <stdexcept>

#include "interpreter.h"

#include "plan.h"

namespace rematfn {
namespace {

// Note [Closure walks are capped]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// The default score sums the cost of a candidate's evicted ancestors. After some thousand evictions
// that closure can be most of the program, and walking it for every candidate would make eviction
// quadratic. The first 256 operations decide: what lies beyond only says "very expensive" more
// loudly. h_DTR is the reference and walks all of it.
constexpr std::size_t kWalkCap = 256;

// See Note [Victims are chosen a batch at a time]
constexpr std::size_t kFew = 128;
constexpr std::size_t kBatchShare = 32;
constexpr std::size_t kLookedAt = 16;

bool is_exact(ScoreKind kind) { return kind == ScoreKind::kDtr || kind == ScoreKind::kEq; }

bool has_neighbourhood(ScoreKind kind) {
  return is_exact(kind) || kind == ScoreKind::kOn || kind == ScoreKind::kMsps;
}

}  // namespace

// ---- making room ------------------------------------------------------------------------------

void Domain::make_room(Table& table, std::size_t nbytes) {
  for (Table* t = &table; t != nullptr; t = t->enclosing.get()) {
    while (t->budget != kNoBudget && t->resident_bytes + nbytes > t->budget) {
      if (!evict_one(*t)) {
        t->note_need(t->resident_bytes + nbytes);
        throw NoRoom{t, t->resident_bytes + nbytes, t->resident_bytes};
      }
    }
  }
}

bool Domain::evict_one(Table& table) {
  return evict_one(table, /*spare_pending=*/true) || evict_one(table, /*spare_pending=*/false);
}

bool Domain::evict_one(Table& table, bool spare_pending) {
  if (Version* victim = choose(table, spare_pending)) {
    evict(*victim);
    return true;
  }
  return std::any_of(table.inner.begin(), table.inner.end(),
                     [&](Table* inner) { return evict_one(*inner, spare_pending); });
}

const Score& Domain::score_of(const Table& table) const {
  const bool guided = guide != nullptr && table.score.kind == ScoreKind::kOn;
  return guided ? guide->plan().score : table.score;
}

// Note [Victims are chosen a batch at a time]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Ages change the scores with every operator, and each eviction those of its neighbours, so no order
// of the candidates lasts; but to score all of them for each eviction makes a program of n operators
// cost n^2. What is among the lowest now will be so for a while. So one look at all n picks enough for
// the next n / 32 evictions; what becomes a candidate meanwhile stands in line behind. The victim is
// the lowest of the first few of both, scored anew; what is dearer by then than the cheapest that was
// not picked leaves the line. Up to 128 candidates, and for h_DTR and h_eq, which are references, all
// are looked at for each eviction.
Version* Domain::choose(Table& table, bool spare_pending) {
  if (table.judge) return choose_by_judge(table, spare_pending);
  const Score& kind = score_of(table);
  Batch& batch = table.batch;
  if (batch.evictions_left == 0) batch.clear();
  bool refused = false;
  Version* victim = lowest_of_batch(table, kind, spare_pending);
  for (;;) {
    if (victim == nullptr) {
      if (!pick_batch(table, kind, spare_pending)) break;
      victim = lowest_of_batch(table, kind, spare_pending);
    }
    if (!held_elsewhere(*victim)) break;
    table.candidates[victim->slot].refused = refused = true;
    batch.remove(*victim);
    victim = lowest_of_batch(table, kind, spare_pending);
  }
  if (refused) {
    for (Candidate& c : table.candidates) c.refused = false;
  }
  if (victim != nullptr) --batch.evictions_left;
  return victim;
}

// The judge may throw; nothing has changed then.
Version* Domain::choose_by_judge(Table& table, bool spare_pending) {
  Version* victim = nullptr;
  double lowest = 0;
  for (std::size_t i = 0; i < table.candidates.size(); ++i) {
    const Candidate& c = table.candidates[i];
    Version& version = *table.candidate_versions[i];
    if (c.pinned || (spare_pending && c.pending) || held_elsewhere(version)) continue;
    const double next = next_use(version);
    const bool known = next != kUnknown && next != kNever;
    const double found = table.judge({.nbytes = c.nbytes,
                                      .cost = c.cost,
                                      .ancestors = neighbourhood(version, ScoreKind::kOn),
                                      .age = clock - c.last_access,
                                      .next_use = known ? std::max(next - clock, 0.0) : next,
                                      .consumed = c.consumed,
                                      .producer = version.producer->name()});
    if (victim != nullptr && found >= lowest) continue;
    victim = &version;
    lowest = found;
  }
  return victim;
}

Version* Domain::lowest_of_batch(Table& table, const Score& kind, bool spare_pending) {
  Batch& batch = table.batch;
  Version* lowest = nullptr;
  double lowest_score = kNever;
  const auto look = [&](std::size_t& first, std::size_t end) {
    while (first < end && batch.versions[first] == nullptr) ++first;
    std::size_t looked_at = 0;
    for (std::size_t i = first; i < end && looked_at < kLookedAt; ++i) {
      Version* version = batch.versions[i];
      if (version == nullptr) continue;
      Candidate& c = table.candidates[version->slot];
      if (spare_pending && c.pending) continue;
      refresh(c, *version, kind.kind);
      const double s = score(kind, c, clock);
      if (s > batch.limit) {
        batch.remove(*version);
        continue;
      }
      ++looked_at;
      if (lowest == nullptr || s < lowest_score) {
        lowest_score = s;
        lowest = version;
      }
    }
  };
  look(batch.first_picked, batch.picked);
  look(batch.first_offered, batch.versions.size());
  return lowest;
}

bool Domain::pick_batch(Table& table, const Score& kind, bool spare_pending) {
  const std::size_t count = table.candidates.size();
  for (std::size_t i = 0; i < count; ++i) {
    Candidate& c = table.candidates[i];
    if (!c.pinned) refresh(c, *table.candidate_versions[i], kind.kind);
  }
  const std::size_t most = is_exact(kind.kind) || count <= kFew ? 1 : count / kBatchShare;
  const Victims victims = choose_victims(kind, table.candidates, clock, spare_pending, most);
  table.batch.clear();
  for (const std::size_t index : victims.indices) {
    table.batch.add(*table.candidate_versions[index]);
  }
  table.batch.picked = table.batch.first_offered = table.batch.versions.size();
  table.batch.limit = victims.lowest_left;
  table.batch.evictions_left = most;
  return !victims.indices.empty();
}

void Domain::refresh(Candidate& c, const Version& version, ScoreKind kind) {
  if (!c.stale || !has_neighbourhood(kind)) return;
  c.neighbours = neighbourhood(version, kind);
  c.next_use = next_use(version);
  c.stale = is_exact(kind);
}

void Domain::evict(Version& version) {
  drop(version);
  ++version.table->statistics.evictions;
  leave(version);
}

void Domain::leave(Version& version) {
  version.table->delist(version);
  version.table->discharge(version.nbytes);
  version.resident = false;
  if (version.producer && version.table->score.kind == ScoreKind::kEq) join_component(*version.producer);
  mark_dependents_stale(version);
  mark_sources_stale(version);
}

void Domain::evict_all(Table& table) {
  for (std::size_t i = table.candidates.size(); i-- > 0;) {
    // Evicting the last candidate keeps the places of those before it.
    evict_if_free(*table.candidate_versions[i]);
  }
  for (Table* inner : table.inner) evict_all(*inner);
}

void Domain::discard(Table& table) {
  for (std::size_t i = table.candidates.size(); i-- > 0;) {
    Version& version = *table.candidate_versions[i];
    if (!version.kept) evict_if_free(version);
  }
  for (Table* inner : table.inner) discard(*inner);
}

bool Domain::evict_if_free(Version& version) {
  const bool free = version.slot != kNoSlot && version.pins == 0 && version.pending == 0 &&
                    !held_elsewhere(version);
  if (free) evict(version);
  return free;
}

void Domain::arrive(Version& version) {
  version.resident = true;
  version.raw = false;  // See Note [Uninitialised memory is kept]
  version.table->charge(version.nbytes);
  version.table->enlist(version);
  if (version.table->score.kind == ScoreKind::kEq) leave_component(*version.producer);
  mark_dependents_stale(version);
  mark_sources_stale(version);
}

void Domain::cut(Version& version) {
  if (version.table) version.table->delist(version);
  auto& outputs = version.producer->outputs;
  std::replace(outputs.begin(), outputs.end(), &version, static_cast<Version*>(nullptr));
  keep_alive(version);
  version.producer.reset();
}

void Domain::trim(Table& table) {
  for (Version* v = table.oldest; v != nullptr && live_operations > most_operations / 2;
       v = v->next) {
    if (v->resident && v->producer) cut(*v);
  }
}

// ---- what is known of the program --------------------------------------------------------------

void Domain::note_call(const ObservedCall& call) {
  if (recorder) recorder->note(call);
  if (guide && !guide->follow(call)) lose_guide();
}

// See Note [Guided, never trusted]
void Domain::lose_guide() {
  guide.reset();
  guide_lost = true;
  std::vector<Table*> tables{root};
  for (std::size_t i = 0; i < tables.size(); ++i) {
    for (Version* v = tables[i]->oldest; v != nullptr; v = v->next) {
      v->next_use = kUnknown;
      v->weight = 1;
      if (tables[i] == root) v->kept = false;  // only a plan has said so
    }
    for (std::size_t k = 0; k < tables[i]->candidates.size(); ++k) {
      Candidate& c = tables[i]->candidates[k];
      c.next_use = kUnknown;
      c.weight = weight_of(*tables[i]->candidate_versions[k]);
    }
    tables.insert(tables.end(), tables[i]->inner.begin(), tables[i]->inner.end());
  }
}

// ---- evicted neighbourhoods -------------------------------------------------------------------

double Domain::neighbourhood(const Version& version, ScoreKind kind) {
  if (!version.producer) return 0;
  if (kind == ScoreKind::kEq) {
    double sum = 0;
    std::vector<std::uint32_t> seen;
    const auto visit = [&](const Operation* operation) {
      if (operation == nullptr || operation->component == 0) return;
      const std::uint32_t root = component_root(operation->component);
      if (std::find(seen.begin(), seen.end(), root) != seen.end()) return;
      seen.push_back(root);
      sum += components_[root].second;
    };
    for (const Input& input : version.producer->inputs) visit(input.version->producer.get());
    for (const Use& use : version.readers) visit(use.operation);
    return sum;
  }
  ++mark_;
  double sum = 0;
  const std::size_t cap = kind == ScoreKind::kDtr ? kNoSlot : kWalkCap;
  walk_.clear();
  version.producer->mark = mark_;
  const auto push_ancestors = [&](const Operation& operation) {
    for (const Input& input : operation.inputs) {
      Operation* producer = input.version->producer.get();
      if (input.version->resident || producer->mark == mark_) continue;
      producer->mark = mark_;
      sum += producer->cost;
      walk_.push_back(producer);
    }
  };
  push_ancestors(*version.producer);
  for (std::size_t i = 0; i < walk_.size() && i < cap; ++i) push_ancestors(*walk_[i]);
  if (kind != ScoreKind::kDtr) return sum;
  // What cannot be had back without this version: the descendants already evicted.
  walk_.clear();
  const auto push_descendants = [&](const Version& v) {
    for (const Use& use : v.readers) {
      if (use.operation->mark == mark_) continue;
      const auto& outputs = use.operation->outputs;
      if (std::none_of(outputs.begin(), outputs.end(),
                       [](const Version* o) { return o != nullptr && !o->resident; })) {
        continue;
      }
      use.operation->mark = mark_;
      sum += use.operation->cost;
      walk_.push_back(use.operation);
    }
  };
  push_descendants(version);
  for (std::size_t i = 0; i < walk_.size(); ++i) {
    for (const Version* output : walk_[i]->outputs) {
      if (output != nullptr && !output->resident) push_descendants(*output);
    }
  }
  return sum;
}

// See Note [Closure walks are capped]
double Domain::next_use(const Version& version) {
  if (version.next_use == kUnknown) return kUnknown;
  double next = version.next_use;
  ++mark_;
  walk_.clear();
  const auto push_readers = [&](const Version& v) {
    for (const Use& use : v.readers) {
      if (use.operation->mark == mark_ || walk_.size() >= kWalkCap) continue;
      use.operation->mark = mark_;
      walk_.push_back(use.operation);
    }
  };
  push_readers(version);
  for (std::size_t i = 0; i < walk_.size(); ++i) {
    for (const Version* output : walk_[i]->outputs) {
      if (output == nullptr || (output->resident && !version.kept)) continue;
      next = std::min(next, output->next_use);
      if (!output->resident) push_readers(*output);
    }
  }
  return next;
}

// A version's bytes come or go: the next use of what it is replayed from changes with that, if it
// will be asked for at all. Most that leave will not: the program has dropped them.
void Domain::mark_sources_stale(const Version& version) {
  if (!version.producer) return;
  if (const double next = next_use(version); next == kUnknown || next == kNever) return;
  ++mark_;
  walk_.assign(1, version.producer.get());
  for (std::size_t i = 0; i < walk_.size(); ++i) {
    for (const Input& input : walk_[i]->inputs) {
      const Version& source = *input.version;
      if (source.slot != kNoSlot) source.table->candidates[source.slot].stale = true;
      Operation* producer = source.producer.get();
      if (source.resident || producer->mark == mark_ || walk_.size() >= kWalkCap) continue;
      producer->mark = mark_;
      walk_.push_back(producer);
    }
  }
}

// See Note [Closure walks are capped]
void Domain::mark_dependents_stale(const Version& version) {
  ++mark_;
  walk_.clear();
  const auto push_readers = [&](const Version& v) {
    for (const Use& use : v.readers) {
      if (use.operation->mark == mark_ || walk_.size() >= kWalkCap) continue;
      use.operation->mark = mark_;
      walk_.push_back(use.operation);
    }
  };
  push_readers(version);
  for (std::size_t i = 0; i < walk_.size(); ++i) {
    for (const Version* output : walk_[i]->outputs) {
      if (output == nullptr) continue;
      if (!output->resident) {
        push_readers(*output);
      } else if (output->slot != kNoSlot) {
        output->table->candidates[output->slot].stale = true;
      }
    }
  }
}

std::uint32_t Domain::component_root(std::uint32_t component) {
  while (components_[component].first != component) {
    components_[component].first = components_[components_[component].first].first;
    component = components_[component].first;
  }
  return component;
}

void Domain::join_component(Operation& operation) {
  if (operation.component != 0) return;
  auto root = static_cast<std::uint32_t>(components_.size());
  components_.emplace_back(root, operation.cost);
  operation.component = root;
  const auto merge = [&](const Operation* neighbour) {
    if (neighbour == nullptr || neighbour->component == 0) return;
    const std::uint32_t other = component_root(neighbour->component);
    if (other == root) return;
    components_[other].second += components_[root].second;
    components_[root].first = other;
    root = other;
  };
  for (const Input& input : operation.inputs) merge(input.version->producer.get());
  for (const Version* output : operation.outputs) {
    if (output == nullptr) continue;
    for (const Use& use : output->readers) merge(use.operation);
  }
}

// Union-find cannot split: the cost leaves the component, its links stay (Kirisame 2021, C.2).
void Domain::leave_component(Operation& operation) {
  if (operation.component == 0) return;
  components_[component_root(operation.component)].second -= operation.cost;
  operation.component = 0;
}

// ---- the lock and the queue of the released ---------------------------------------------------

void Domain::release(Ref<Version> version, Ref<Table> level, Bytes bytes) {
  const std::shared_ptr<Domain> alive = shared_from_this();
  // See Note [The program may drop a tensor at any time]
  if (mutex_.try_lock()) {
    const bool busy = depth_ > 0;
    if (!busy) {
      bury_contents(std::move(version), bytes);
      level.reset();
      drain();
      mutex_.unlock();
      drain_if_free();
      return;
    }
    mutex_.unlock();
  }
  {
    const std::lock_guard guard(released_mutex_);
    released_.push_back({std::move(bytes), std::move(version), std::move(level)});
    any_released_ = true;
  }
  drain_if_free();
}

// Note [A kept value outlives the program's tensors]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// In `(x @ w).tanh()` autograd saves the result alone, and the program drops the product. Whoever
// asks for products to be kept wants the result to be replayed from it. So a kept value that the
// program drops stays, as long as the program holds something that would be replayed from it, and
// goes with the last such thing. Without these rules almost all of the forward would stay to the end:
//   1. A gradient is no such thing, though it is made from all of the forward; nor does it stay.
//   2. Nor is what is small beside the value, such as the loss.
//   3. Beyond the next kept value, that one serves.
//   4. Where all but the named is kept, nothing stays.
void Domain::bury_contents(Ref<Version> version, const Bytes& bytes) {
  if (!version) return;
  version->program = false;
  if (recorder) recorder->note_release(*version);
  const bool stays = version->resident && version->producer && is_kept_for_somebody(*version) &&
                     retain(*version, bytes);
  retains_ |= stays;
  if (!stays && forget(*version) && version->table && version->resident) leave(*version);
  if (retains_) let_go_of_kept_for(*version);
}

bool Domain::is_kept_for_somebody(const Version& version) {
  constexpr std::size_t kSmall = 64;  // so many times smaller
  if (!version.kept || version.backward || !version.table) return false;
  if (version.table->keeping.marks == Keeping::Marks::kAllBut) return false;
  ++mark_;
  walk_.clear();
  const auto push_readers = [&](const Version& v) {
    for (const Use& use : v.readers) {
      if (use.operation->mark == mark_) continue;
      use.operation->mark = mark_;
      walk_.push_back(use.operation);
    }
  };
  push_readers(version);
  for (std::size_t i = 0; i < walk_.size(); ++i) {
    if (i == kWalkCap) return true;  // See Note [Closure walks are capped]
    for (const Version* output : walk_[i]->outputs) {
      if (output == nullptr) continue;
      if (output->pending > 0) return true;
      const bool is_small = output->nbytes < version.nbytes / kSmall;
      if (output->program && !output->backward && !is_small) return true;
      if (!output->resident && !output->kept) push_readers(*output);
    }
  }
  return false;
}

// See Note [A kept value outlives the program's tensors]
void Domain::let_go_of_kept_for(const Version& version) {
  if (!version.producer) return;
  ++mark_;
  walk_.assign(1, version.producer.get());
  std::vector<Version*> sources;
  for (std::size_t i = 0; i < walk_.size() && i < kWalkCap; ++i) {
    for (const Input& input : walk_[i]->inputs) {
      Version& source = *input.version;
      if (source.program) continue;
      if (source.kept && source.slot != kNoSlot) sources.push_back(&source);
      if (source.kept || source.resident || source.producer->mark == mark_) continue;
      source.producer->mark = mark_;
      walk_.push_back(source.producer.get());
    }
  }
  for (Version* source : sources) {
    const bool free = source->slot != kNoSlot && source->pins == 0 && source->pending == 0;
    if (!free || is_kept_for_somebody(*source)) continue;
    drop(*source);
    leave(*source);
  }
}

void Domain::drain_released_if_free() {
  while (any_released_ && mutex_.try_lock()) {
    const bool busy = depth_ > 0;
    if (!busy) drain();
    mutex_.unlock();
    if (busy) break;
  }
}

void Domain::drain_released() {
  while (any_released_) {
    std::vector<Released> batch;
    {
      const std::lock_guard guard(released_mutex_);
      batch.swap(released_);
      any_released_ = false;
    }
    for (Released& released : batch) bury_contents(std::move(released.version), released.bytes);
  }
}

// See Note [A fork loses the domains of other threads]
void Domain::after_fork() {
  lost_to_fork_ = !mutex_.try_lock();
  if (!lost_to_fork_) mutex_.unlock();
}

DomainLock::DomainLock(std::shared_ptr<Domain> domain) : domain_(std::move(domain)) {
  if (domain_->lost_to_fork_) {
    throw std::runtime_error(
        "rematfn: this tensor's level was running an operator on another thread when the process "
        "forked, and is lost to the child. Fork while no other thread is in the level, or pass a "
        "clone made outside of it.");
  }
  lock_without_interpreter(domain_->mutex_);
  if (domain_->depth_ == 0) domain_->drain();
  ++domain_->depth_;
}

DomainLock::~DomainLock() {
  if (--domain_->depth_ == 0) domain_->drain();
  domain_->mutex_.unlock();
  domain_->drain_if_free();
}

}  // namespace rematfn
