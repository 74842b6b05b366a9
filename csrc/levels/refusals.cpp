// SPDX-License-Identifier: Apache-2.0
#include "levels/refusals.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <iomanip>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include "base/interpreter.h"
#include "planning/advice.h"
#include "tensors/move.h"

namespace rematfn {
namespace {

// What the levels that share a budget hold, by the function that they run.
std::string holders_of(const SharedBudget& budget) {
  struct Holder {
    std::size_t calls = 0;
    std::size_t nbytes = 0;
  };
  std::map<std::string, Holder> holders;
  budget.visit_tables([&](const Table& table) {
    if (table.counted == 0) return;
    Holder& holder = holders[static_cast<const Level&>(table).name];
    ++holder.calls;
    holder.nbytes += table.counted;
  });
  std::string text;
  for (const auto& [name, holder] : holders) {
    text += "\n  held by     " + name + ": " + format_bytes(holder.nbytes);
    if (holder.calls > 1) text += " in " + std::to_string(holder.calls) + " calls";
  }
  return text;
}

// What lies in the tiers of a level and those around it.
std::string tiers_of(const Level& level) {
  std::string text;
  for (const Level* l = &level; l != nullptr; l = l->enclosing_level()) {
    const bool on_accelerator = l->tensor_domain().streams.any();
    for (const auto& tier : l->tiers) {
      const TierFigures now = tier->figures();
      if (tier->link().packs) {
        text += "\n  packed      " + format_bytes(now.held) + ", in the budget";
        continue;
      }
      std::string line = "\n  on the " + std::string(tier->name) + " " + format_bytes(now.held) + " of " +
                         format_bytes(now.capacity);
      if (!now.trouble.empty()) line += ": " + now.trouble;
      if (l->tiers.size() == 1 && tier->for_accelerators != on_accelerator) {
        line += on_accelerator ? "; values on an accelerator do" : "; values on a CPU do";
        line += " not go there: name no tier, and each goes where it can";
      }
      if (text.find(line) == std::string::npos) text += line;  // two levels' tiers may have the same to say
    }
  }
  return text;
}

// Whether the program has made nodes of autograd's.
bool expects_backward(const Level& level) {
  return at::sequence_number::peek() > level.first_node || torch::autograd::get_current_node();
}

Advice advice_for(const NoRoom& why, const ObservedCall* refused) {
  const auto& level = static_cast<const Level&>(*why.table);
  auto tiers = level.tiers;
  const bool is_on_accelerator = level.tensor_domain().streams.any();
  std::erase_if(tiers, [&](const auto& tier) { return tier->for_accelerators && !is_on_accelerator; });
  const auto link = link_to(tiers, level.drops);
  return advise(why, refused, expects_backward(level), level.wording, level.most_replays, link);
}

// What the program of an outermost level costs, backward included, as far as can be told.
double program_cost(const Level& level) {
  constexpr double kWithBackward = 3;
  const double so_far = level.statistics.base_cost;
  if (!expects_backward(level)) return so_far;
  if (at::GradMode::is_enabled()) return kWithBackward * so_far;
  return std::max(so_far, kWithBackward * level.domain->thrash.forward());
}

// Where the program is, if there is a journal.
std::string place_of(const Level& level) {
  const Journal* journal = level.domain->observers.journal.get();
  const std::uint32_t place = journal == nullptr ? 0 : journal->place_of_last();
  if (place == 0) return "";
  const bool backward = journal->calls.back().site.place == 0;
  return (backward ? ", in the backward of " : ", at ") + describe_place(place) + ",";
}

// What the call has changed that the caller has, and will find changed.
std::string changes_of(const Level& level) {
  const auto& outermost = static_cast<const Level&>(*level.domain->root);
  const std::size_t count = outermost.written_outside.size();
  if (count == 0) return "";
  return "\nThe call had written to " + std::to_string(count) + (count == 1 ? " tensor" : " tensors") +
         " of the caller's by then (parameters, buffers, states, gradients): what it updates is half updated.";
}

// What the operator takes by itself, if that alone is more than the budget. Of one that is refused while it
// runs, what it reads is not known.
std::string needs_alone(const NoRoom& why, const ObservedCall* refused, const std::string& what) {
  if (!what.starts_with('`')) return "";  // no operator
  const auto& level = static_cast<const Level&>(*why.table);
  std::size_t reads = 0;
  std::set<const Version*> counted;
  if (refused != nullptr) {
    for (const ObservedCall::Read& read : refused->reads) counted.insert(read.version.get());
  }
  for (const Version* version : counted) {
    if (version->table && is_within(version->table.get(), level)) reads += version->nbytes;
  }
  // What there was no room for may be a replay's. Of an operator that is running it is what it has asked for.
  const std::size_t makes =
      refused != nullptr ? refused->output_bytes : why.smallest_budget - why.unevictable;
  if (reads + makes <= level.budget) return "";
  const auto written = [&](std::size_t nbytes) { return format_bytes(nbytes, level.wording); };
  const std::string read = reads > 0 ? " reads " + written(reads) + " that count and" : "";
  return "\n" + what + read + " allocates " + written(makes) +
         ": no eviction helps. On half of the batch, or with numbers of half the width (bfloat16 for "
         "float32), it takes about half.";
}

std::string in_multiples(double number) {
  std::ostringstream text;
  text << std::setprecision(3) << number;
  return text.str();
}

}  // namespace

// See Note [A call that thrashes is stopped]
void stop_if_thrashing(Level& level) {
  constexpr std::uint64_t kFewReplays = 100;
  auto& outermost = static_cast<Level&>(*level.domain->root);
  if (outermost.most_replays == kNever) return;
  const Statistics& statistics = outermost.statistics;
  if (statistics.replayed_cost <= outermost.most_replays * statistics.base_cost) return;
  const double cost = program_cost(outermost);
  if (statistics.replayed_cost <= outermost.most_replays * cost) return;
  if (statistics.replays < kFewReplays) return;
  outermost.report->stopped = true;
  const NoRoom why{&outermost, outermost.budget + outermost.budget / 64 + 1,
                   outermost.used_bytes(), /*thrashing=*/true};
  const Advice advice = advice_for(why, nullptr);
  const std::string raise_it =
      advice.covers == Advice::Covers::kNothing
          ? "."
          : " to about " + advice.figure.text + ", in which it does not, as far as is known.";
  raise(ErrorKind::kBudget,
        outermost.name + ": by now the call has replayed " +
            in_multiples(statistics.replayed_cost / cost) + " times what the program costs within " +
            format_bytes(outermost.budget, outermost.wording) + ", and is stopped at " +
            in_multiples(outermost.most_replays) + " times. Raise the budget" + raise_it +
            " Or give most_replays a larger number." + changes_of(outermost));
}

void raise_budget_error(const NoRoom& why, const std::string& what, const ObservedCall* refused, bool in_kernel) {
  const auto& level = static_cast<const Level&>(*why.table);
  const auto written = [&](std::size_t nbytes) { return format_bytes(nbytes, level.wording); };
  const std::string budget = written(level.budget);
  const Advice advice = advice_for(why, refused);
  const std::string place = place_of(level);
  const std::string holders = level.shared ? holders_of(*level.shared) : "";
  std::string raise_it = "\nRaise the budget to " + advice.in_words() + ".";
  if (level.tensor_domain().streams.is_captured()) {  // See Note [A captured call keeps to itself], 4
    raise_it = "\nRaise the budget above " + written(why.smallest_budget) + ". How much all of the call needs is not "
               "known while a graph captures it: what draws random numbers is kept in a capture.";
  }
  if (in_kernel) raise_it += " The kernel had begun, and may ask for more.";
  if (advice.covers != Advice::Covers::kAll) {
    raise_it += " rematfn.profile(step, ...).min_budget tells what a whole step needs.";
  }
  const std::string message =
      why.thrashing
          ? level.name + ": the inputs of " + what + place + " were evicted, and within " + budget +
                " their replays evict each other without end." + raise_it
          : level.name + ": " + what + place + " needs " + written(why.smallest_budget) +
                " resident at once, the budget is " + budget + ".\n  kept        " +
                written(why.unevictable) +
                (!level.tiers.empty() ? ", pinned, or with no room where it would go" : ", pinned or not replayable") +
                holders + tiers_of(level) +
                "\n  to allocate " + written(why.smallest_budget - why.unevictable) +
                needs_alone(why, refused, what) + raise_it;
  raise(ErrorKind::kBudget, message + changes_of(level));
}

void materialize_for(Level& level, c10::ArrayRef<Version*> wanted, const std::string& what) {
  level.tensor_domain().bury_unreported();
  level.tensor_domain().streams.see_captures();
  try {
    level.domain->materialize({wanted.data(), wanted.size()});
  } catch (const NoRoom& why) {
    raise_budget_error(why, what);
  }
}

}  // namespace rematfn
