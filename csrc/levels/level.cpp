// SPDX-License-Identifier: Apache-2.0
#include "levels/level.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "engine/guide.h"
#include "levels/allocator.h"
#include "levels/device_memory.h"
#include "levels/governed_nodes.h"
#include "memory/pages.h"
#include "tensors/move.h"
#include "tensors/settings.h"
#include "tensors/torch_layout.h"

namespace rematfn {
namespace {

// The top of this thread's stack; each level on it lies inside of the one below.
REMATFN_THREAD_LOCAL Level* top_level = nullptr;
REMATFN_THREAD_LOCAL Level* hidden_level = nullptr;  // that was, and will be
REMATFN_THREAD_LOCAL bool saw_operators = false;  // before the first of them: see_operators()

// Every live domain.
struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<TensorDomain>> domains;
};
Registry& registry = *new Registry;  // outlives the tensors of a dying process

// Note [A forked child is under no level]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A worker of a DataLoader that is made inside a level is a program of its own: its tensors are no
// intermediates of `f`, and it hands them to torch's shared memory. So the levels of the parent are
// over in the child. A child that goes on with `f` computes the same, without the budget.

// See Note [A fork loses the domains of other threads]
void before_fork() {
  registry.mutex.lock();
  const bool is_live = std::ranges::any_of(registry.domains, [](const auto& entry) { return !entry.expired(); });
  if (is_live) end_threads_of_loops();  // See Note [A fork leaves OpenMP's threads behind]
  handle_lock.lock();
}
void after_fork_in_parent() {
  handle_lock.unlock();
  registry.mutex.unlock();
}
// See Note [A forked child is under no level]
void after_fork_in_child() {
  handle_lock.unlock();
  for (const auto& entry : registry.domains) {
    const auto domain = entry.lock();
    if (!domain) continue;
    domain->after_fork();
    for (Table* level : domain->levels) static_cast<Level*>(level)->active = false;
  }
  registry.mutex.unlock();
  if (top_level != nullptr) set_intercepting(false);
  top_level = hidden_level = nullptr;
  settle_settings_after_fork();
}

std::shared_ptr<TensorDomain> make_domain() {
  static const int watching_forks =
      pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child);
  TORCH_INTERNAL_ASSERT(watching_forks == 0);
  auto domain = std::make_shared<TensorDomain>();
  const std::lock_guard guard(registry.mutex);
  std::erase_if(registry.domains, [](const auto& entry) { return entry.expired(); });
  registry.domains.push_back(domain);
  return domain;
}

c10::intrusive_ptr<UnrecordedBytes> make_unrecorded(const LevelOptions& options,
                                                    const Level* outer) {
  auto around = outer == nullptr ? nullptr : outer->unrecorded;
  if (options.budget == kNoBudget && !options.record && !options.where && !around) return {};
  auto shared = is_shared_around(options.shared, outer) ? nullptr : options.shared;
  return c10::make_intrusive<UnrecordedBytes>(std::move(around), std::move(shared));
}

// See Note [Bytes beside operators]
bool count_unrecorded(Level& level) {
  bool changed = false;
  for (Level* l = &level; l != nullptr && l->unrecorded; l = l->enclosing_level()) {
    changed |= l->ledger.note_unrecorded(*l, l->unrecorded->live());
  }
  return changed;
}

void push(Level& level) {
  const bool is_first = std::exchange(top_level, &level) == nullptr;
  if (!is_first) return;
  saw_operators = is_intercepting();
  set_intercepting(true);
}

// Takes `level`, and what is above it, off the stack. False if it is not there.
bool pop(const Level& level) {
  const Level* found = top_level;
  while (found != nullptr && found != &level) found = found->enclosing_level();
  if (found == nullptr) return false;
  top_level = level.enclosing_level();
  if (top_level != nullptr) return true;
  set_intercepting(false);
  if (saw_operators) see_operators();
  return true;
}

}  // namespace

Level::Level(const LevelOptions& options, std::shared_ptr<TensorDomain> owner, Level* outer)
    : Table(owner, *owner, outer, options.budget, options.policy),
      name(options.name),
      wording(options.wording),
      timed(options.timed || (outer != nullptr && outer->timed)),
      verify(options.verify || (outer != nullptr && outer->verify)),
      most_replays(options.most_replays),
      tiers(options.tiers),
      drops(options.drops),
      rounded_before(count_rounded()),
      thread(at::RecordFunction::currentThreadId()),
      first_node(at::sequence_number::peek()),
      last_thread(thread),
      unrecorded(make_unrecorded(options, outer)),
      tenant_(outer != nullptr && outer->tenant_ != nullptr     ? outer->tenant_
              : options.budget != kNoBudget || options.record ? this
                                                                : nullptr),
      first_nodes_{{thread, first_node}} {
  report->unrecorded = unrecorded;
  if (unrecorded) ++UnrecordedBytes::counting;
  fraction = options.fraction;
  is_estimate = options.is_estimate;
  is_estimate_unguided = options.is_estimate_unguided;
  if (outer == nullptr) domain->root = this;
  tensor_domain().levels.push_back(this);
  if (tenant_ == this) pages().enter(*this);
}

// Note [Nodes are numbered by thread]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Autograd numbers the nodes that a thread makes, and two threads' numbers say nothing of each other.
// An accelerator's backward runs on a thread of its own, and with create_graph makes nodes there, inside
// of `f` or in a backward of its graph. So a level keeps, for each thread that its operators run on, the
// number of the first node that was made for one of them. Autograd makes an operator's node before we
// see the operator. What a thread made that no operator of the level ran on was made outside, and a
// gradient that arrives there is sealed.
void Level::enter_thread(std::uint64_t this_thread, bool has_node) {
  const std::uint64_t made = at::sequence_number::peek();
  const std::uint64_t first = made - (has_node && made > 0 ? 1 : 0);
  for (Level* level = this; level != nullptr; level = level->enclosing_level()) {
    level->last_thread = this_thread;
    level->first_nodes_.try_emplace(this_thread, first);
  }
}

bool Level::made_node(std::uint64_t on_thread, std::uint64_t number) const {
  const auto found = first_nodes_.find(on_thread);
  return found != first_nodes_.end() && number >= found->second;
}

Level::~Level() {
  if (shared) ledger.leave_shared(*this);
  if (unrecorded) --UnrecordedBytes::counting;
  if (tenant_ == this) {
    pages().leave(*this);
    keep_pages_for_a_while();
  }
  std::erase(tensor_domain().levels, this);
}

bool Level::lives() const { return active || resident_bytes() > 0; }

std::size_t Level::unused() const {
  const std::size_t budget = report->budget;  // that of a fraction may rise
  if (budget == kNoBudget && !leaves_early) return kNoBudget;  // it is recorded, and may have what it likes
  if (shared) return shared->unused_of_each();
  const std::int64_t in_flight = in_flight_.load(std::memory_order_relaxed);
  const std::size_t used = used_bytes() + static_cast<std::size_t>(std::max<std::int64_t>(in_flight, 0));
  if (budget == kNoBudget) {  // as much as it has had at once; what has been cut off of packed values is not used again
    most_used_ = std::max(most_used_, used);
    return most_used_ - used;
  }
  return (used < budget ? budget - used : 0) + results_ahead();
}

std::size_t Level::handed_out() const { return report->budget == kNoBudget ? 0 : results_left(); }

void Level::emptied() {
  if (tenant_ != this || active) return;
  pages().trim();
  keep_pages_for_a_while();
}

// With what the next block may take.
std::size_t Level::rounded_up() const {
  constexpr std::int64_t kMostUnsplit = std::int64_t{1} << 20;
  const std::int64_t grown = last_rounded() - rounded_before;
  return grown > 0 ? static_cast<std::size_t>(grown + kMostUnsplit) : 0;
}

void Level::note_in_flight(std::int64_t nbytes) {
  if (tenant_ == nullptr) return;
  auto& sum = tenant_->in_flight_;  // changes under the domain's lock
  sum.store(sum.load(std::memory_order_relaxed) + nbytes, std::memory_order_relaxed);
}

Level* Level::heir() const {
  Level* level = enclosing_level();
  while (level != nullptr && !level->active) level = level->enclosing_level();
  return level;
}

LevelHandle::LevelHandle(Level& level) : level_(&level) {}

// See Note [The program may drop a tensor at any time]
LevelHandle::~LevelHandle() {
  Domain& domain = *level_->domain;
  domain.release({}, std::move(level_), &Store::no_bytes);
}

Level* current_level() { return top_level; }

std::size_t stack_depth() { return top_level == nullptr ? 0 : top_level->depth; }

void hide_levels() {
  if (top_level != nullptr) hidden_level = std::exchange(top_level, nullptr);
}

void show_levels() {
  if (hidden_level != nullptr) top_level = std::exchange(hidden_level, nullptr);
}

std::shared_ptr<LevelHandle> push_level(const LevelOptions& options) {
  install_allocator();
  Level* enclosing = current_level();
  auto domain = enclosing == nullptr
                    ? make_domain()
                    : std::static_pointer_cast<TensorDomain>(enclosing->domain);
  const DomainLock lock(domain);
  const Ref<Level> level(new Level(options, domain, enclosing));
  if (enclosing == nullptr) {
    domain->limit_operations(options.max_operations);
    domain->observers.guide = options.guide;
    domain->known = options.known;
    if (options.guide && options.as_recorded) domain->expect_results(options.guide->result_bytes());
    if (options.record) {
      domain->observers.recorder = std::make_unique<Recorder>();
      level->report->trace = domain->observers.recorder->trace;
    }
  }
  if (!options.tiers.empty()) {
    std::vector<Way*> ways;
    if (options.drops) ways.push_back(&domain->drop_and_replay);
    for (const auto& tier : options.tiers) ways.push_back(&way_to(*domain, tier, options.drops));
    level->evict_by(std::move(ways));
    level->leaves_early |= options.leaves_early;
  }
  if (options.shared && !is_shared_around(options.shared, enclosing)) domain->join(*level, options.shared);
  if (options.where && !domain->observers.journal) {
    domain->observers.journal = std::make_shared<Journal>(*domain->root);
  }
  level->report->journal = domain->observers.journal;
  auto handle = std::make_shared<LevelHandle>(*level);
  level->active = true;
  push(*level);
  govern_thread(handle);
  return handle;
}

// Note [Calls that are interleaved]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Greenlets share a thread, and with it its stack of levels. One that is switched away from inside of
// its call leaves its level on the stack; the level of the next one goes on top. If the first then
// ends before the second, what ends is not on top. Its operators have run under the second's level and
// the other way round: exact, but under budgets that are not theirs. So all levels from the first
// one's upward are over: this call says so, and each of the others when it ends. Whatever it computes
// until then, it computes under no level.
std::string pop_level(Level& level) {
  leave_thread(level);
  if (!level.active) return {};  // See Note [A forked child is under no level]
  if (top_level == nullptr) show_levels();  // whoever hid it has failed
  const Level* between = top_level;
  const bool on_top = between == &level;
  if (!pop(level)) between = level.enclosing_level();
  const DomainLock lock(level.domain);
  level.active = false;
  level.tensor_domain().outside.note_bumps();
  if (level.resident_bytes() == 0) level.emptied();
  if (on_top) return {};
  return level.name + ": this call and that of " +
         (between == nullptr ? "another function" : between->name) +
         " are interleaved: one of them began inside of the other, and has not ended there. Calls "
         "nest on a thread; greenlets that switch inside of them do not. Switch (wait, sleep, read) "
         "outside of the function, or give each call a thread of its own.";
}

std::vector<std::shared_ptr<TensorDomain>> live_domains() {
  std::vector<std::shared_ptr<TensorDomain>> live;
  const std::lock_guard guard(registry.mutex);
  for (const auto& entry : registry.domains) {
    auto domain = entry.lock();
    if (domain && !domain->lost_to_fork()) live.push_back(std::move(domain));
  }
  return live;
}

bool Level::give_back_dropped() {
  tensor_domain().outside.release_dropped(/*weighs=*/false);
  return count_unrecorded(*this);
}

// See Note [Bytes beside operators]
void notice_unrecorded(Level& level) {
  if (!count_unrecorded(level)) return;
  level.domain->make_room(level, 0);
  level.note_peak(0);
}

void for_each_live_domain(c10::function_ref<void(TensorDomain&)> visit, const Domain* but) {
  for (const auto& domain : live_domains()) {
    if (domain.get() == but) continue;
    const DomainLock lock(domain);
    visit(*domain);
  }
}

REMATFN_REVEAL(QueueSetterOf, torch::autograd::Engine::init_local_ready_queue)

// See Note [Levels outlive the interpreter]
void empty_ready_queue() {
  if (torch::autograd::get_current_node()) return;  // somebody has called the exit handlers in a backward
  auto& engine = torch::autograd::Engine::get_default_engine();
  (engine.*reveal(QueueSetterOf()))(std::make_shared<torch::autograd::ReadyQueue>());
}

void hold_all_levels() {
  for (const auto& domain : live_domains()) new DomainLock(domain, std::try_to_lock);
}

bool is_over(const Report& report) {
  const std::shared_ptr<Domain> domain = report.domain.lock();
  if (!domain || domain->lost_to_fork()) return true;
  const DomainLock lock(domain, std::try_to_lock);  // whoever asks has a lock that others wait for
  if (!lock) return false;  // another thread is at it
  const auto& levels = static_cast<TensorDomain&>(*domain).levels;
  const auto is_active = [](const Table* level) { return bool{static_cast<const Level*>(level)->active}; };
  return domain->live_operations == 0 && std::none_of(levels.begin(), levels.end(), is_active);
}

}  // namespace rematfn
