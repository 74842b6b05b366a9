// SPDX-License-Identifier: Apache-2.0
#include "levels/contents_watch.h"

#include <ATen/record_function.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/interpreter.h"
#include "levels/level.h"

namespace rematfn {
namespace {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// The contents of a version as they were when an operator last began or ended.
struct Seen {
  WeakStorage storage;  // by which one version is told from another at its address
  const void* data;
  std::size_t hash;
};
using AllSeen = std::unordered_map<const Version*, Seen>;

struct Watch {
  std::mutex mutex;
  std::optional<at::CallbackHandle> callback;
  AllSeen seen;
  std::string last = "the start";  // where it was looked last
  std::vector<std::string> found;
};

Watch& watch() {
  static auto* const instance = new Watch;
  return *instance;
}

struct Begun final : at::ObserverContext {};

// Operators of the program that this thread is in.
std::vector<std::string>& running() {
  thread_local std::vector<std::string> names;
  return names;
}

// Where the contents are, if nobody may write there but by operators.
c10::Storage storage_of(const TensorVersion& version) {
  const bool may_be_written = version.raw || version.is_addressed() || version.readings;
  if (!version.is_here() || may_be_written) return {};
  if (version.outside != nullptr && version.counter.enabled() &&
      version.counter.current_version() != version.counted) {
    return {};  // a write that is known of
  }
  if (version.storage) return version.storage;
  const auto cell = version.own_cell();
  return cell ? c10::Storage(cell->storage.lock()) : c10::Storage();
}

void look_at(Watch& watch, const TensorVersion& version, const std::string& now, AllSeen& seen) {
  const c10::Storage storage = storage_of(version);
  if (!storage || !storage.device().is_cpu() || storage.data() == nullptr) return;
  const std::string_view bytes(static_cast<const char*>(storage.data()), storage.nbytes());
  const Seen next{storage.getWeakStorageImpl(), storage.data(),
                  std::hash<std::string_view>{}(bytes)};
  if (!seen.emplace(&version, next).second) return;
  const auto found = watch.seen.find(&version);
  if (found == watch.seen.end()) return;
  const Seen& before = found->second;
  if (before.storage._unsafe_get_target() != storage.unsafeGetStorageImpl() ||
      before.data != next.data || before.hash == next.hash) {
    return;
  }
  const std::string maker =
      version.producer ? "`" + std::string(version.producer->name()) + "`" : "no recorded operator";
  std::string message = "contents made by " + maker + " were changed without a recorded write, after " +
                        watch.last + " and before " + now;
  for (const std::string& name : running()) message += ", inside of `" + name + "`";
  watch.found.push_back(std::move(message));
}

void look(const std::string& now) {
  // No thread that has a domain's lock waits for this one.
  lock_without_interpreter(watch().mutex);
  const std::lock_guard guard(watch().mutex, std::adopt_lock);
  AllSeen seen;
  for_each_live_domain([&](TensorDomain& domain) {
    for (const Table* level : domain.levels) {
      for (const Version* v = level->oldest; v != nullptr; v = v->next) {
        look_at(watch(), static_cast<const TensorVersion&>(*v), now, seen);
        if (!v->producer) continue;
        // What is the caller's stands in no table.
        for (const Input& input : v->producer->inputs) {
          const auto& read = static_cast<const TensorVersion&>(*input.version);
          if (!read.table) look_at(watch(), read, now, seen);
        }
      }
    }
  });
  watch().seen = std::move(seen);
  watch().last = now;
}

// Within an operator of a level all is in flux.
std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
  if (DomainLock::is_held()) return nullptr;
  look("the beginning of `" + std::string(function.name()) + "`");
  running().emplace_back(function.name());
  return std::make_unique<Begun>();
}

void end(const at::RecordFunction& function, at::ObserverContext* context) {
  if (context == nullptr) return;
  look("the end of `" + std::string(function.name()) + "`");
  running().pop_back();
}

}  // namespace

void watch_contents(bool on) {
  if (watch().callback) at::removeCallback(*watch().callback);
  watch().callback.reset();
  watch().seen.clear();
  if (!on) return;
  watch().found.clear();
  watch().last = "the start";
  watch().callback = at::addGlobalCallback(
      at::RecordFunctionCallback(&begin, &end).scopes({at::RecordScope::FUNCTION}));
}

std::vector<std::string> changed_contents() {
  look("the end");
  const std::lock_guard guard(watch().mutex);
  return watch().found;
}

}  // namespace rematfn
