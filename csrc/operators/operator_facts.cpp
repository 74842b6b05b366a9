// SPDX-License-Identifier: Apache-2.0
#include "operators/operator_facts.h"

#include <ATen/core/enum_tag.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <string_view>

namespace rematfn {
namespace {

std::atomic<std::uint64_t> generation{0};

// Note [Writes that schemas do not mention]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// The batch norms that predate functionalization update the running statistics they are given, and
// their schemas say nothing of it. Replaying one as it is recorded would move the statistics twice.
// native_batch_norm has siblings on other backends and for synchronised batch norm. That oneDNN's recurrent
// backward works in its forward's workspace is none: no result depends on what it leaves there.
//
// The schema of rrelu_with_noise does mention that it writes its noise. But in eval it does not, and
// the noise stays what `empty` left there, which no replay would give again.
struct HiddenWrite {
  std::string_view name;
  std::array<std::uint8_t, 2> arguments;
  int training_argument;
};
constexpr std::string_view kResize = "inductor::resize_storage_bytes_";
constexpr std::array<HiddenWrite, 10> kHiddenWrites{{
    {"aten::native_batch_norm", {3, 4}, 5},
    {"aten::cudnn_batch_norm", {3, 4}, 5},
    {"aten::miopen_batch_norm", {3, 4}, 5},
    {"aten::rrelu_with_noise", {1, 1}, 4},
    {"aten::rrelu_with_noise_", {1, 1}, 4},
    {"aten::batch_norm_update_stats", {1, 2}, -1},
    {"aten::batch_norm_gather_stats", {3, 4}, -1},
    {"aten::batch_norm_gather_stats_with_counts", {3, 4}, -1},
    {"aten::_saturate_weight_to_fp16", {0, 0}, -1},
    {kResize, {0, 0}, -1},
}};

// Note [Collectives go on after they return]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Collectives talk to other processes, which do not replay with us. Their schemas do not mention
// what they write (`c10d::allreduce_(Tensor[] tensors, ..)`), and they come back before they have:
// a thread of the process group's goes on reading and writing at the addresses it was given, until
// somebody waits for it. So whatever they are given keeps its bytes from then on, and so do their results;
// where there is a tier, these may be moved once `wait_tensor` has returned. A wait by a c10d `Work`
// is no operator: nothing that it waits for is moved. Of the c10d operators, all that is not called an
// input is written.
//
// Note [Who waits for other ranks holds no lock]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A kernel runs under its domain's lock, and an operator that writes what autograd does not count asks every
// domain. If a kernel waited for another rank meanwhile, where that rank's thread waits for such an operator of
// a thread that waits in its turn for us, all would wait for ever. So a barrier, which is given a dummy and
// computes nothing, runs without the lock and is not recorded; a wait for a tensor runs without it first, and
// as an operator finds the work done. A collective that connects the ranks as it is called first, as NCCL's
// do, still waits under the lock.
constexpr std::array<std::string_view, 7> kCommunication{
    "c10d::", "_c10d_functional::", "c10d_functional::", "_c10d_functional_autograd::",
    "_dtensor::", "symm_mem::", "fsdp::"};

// Prims that draw from a generator. Torch tags them in Python alone, where no dispatcher asks.
constexpr std::array<std::string_view, 6> kRandomPrims{
    "prims::normal",         "prims::uniform",
    "prims::inductor_seed",  "prims::inductor_seeds",
    "prims::inductor_rand_eager_offset", "prims::inductor_rand_eager_offsets"};

// Note [Uninitialised memory is kept]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Programs fill the result of `empty` by raw pointer, where no dispatcher sees it: torch.tensor([..])
// does, and so does every extension that is passed data_ptr(). Evicting it and replaying `empty`
// would lose the contents without a word. So such a version is not evicted while an operator has
// not written it. If the first operator to touch it only overwrites (`copy_`, `fill_`, `out=`), its
// contents were garbage, and replaying `empty` gives as good. If it reads, they were not: the version
// becomes a constant. `lift_fresh`, torch.tensor's last act, counts as a reader. What a replay of
// `empty` makes is evicted like anything else: only replays see it, for the program is past the write.
//
// What is known of single operators, by name, and neither their schemas nor their tags tell.
struct Exception {
  std::string_view name;
  bool OperatorFacts::*fact;
};
constexpr Exception kExceptions[] = {
    // Aliases without a word in the schema; made by reshaping alone.
    {"aten::_unsafe_view", &OperatorFacts::is_view},
    {"aten::unsafe_split", &OperatorFacts::is_view},
    {"aten::unsafe_split_with_sizes", &OperatorFacts::is_view},
    // A second run of these is not the first one's twin, bit for bit.
    {"aten::_ctc_loss", &OperatorFacts::never_replayed},
    {"aten::linalg_lstsq", &OperatorFacts::never_replayed},
    // See Note [What is asked before bytes are read]
    {"aten::detach", &OperatorFacts::announces_read},
    {"aten::is_pinned", &OperatorFacts::announces_read},
    {"aten::_nested_view_from_buffer", &OperatorFacts::announces_read},  // sizes, strides, offsets
    {"aten::is_pinned", &OperatorFacts::announces_address},
    {"aten::record_stream", &OperatorFacts::announces_read},
    {"aten::record_stream", &OperatorFacts::is_view},  // nor does it write
    {"aten::set_", &OperatorFacts::moves_storage},
    {kResize, &OperatorFacts::resizes_storage},
    // See Note [Uninitialised memory is kept]
    {"aten::lift_fresh", &OperatorFacts::ends_filling},
    {"aten::copy_", &OperatorFacts::overwrites},
    {"aten::fill_", &OperatorFacts::overwrites},
    {"aten::zero_", &OperatorFacts::overwrites},
    {"aten::index_put_", &OperatorFacts::overwrites},
    {"aten::index_copy_", &OperatorFacts::overwrites},
    {"aten::index_fill_", &OperatorFacts::overwrites},
    {"aten::scatter_", &OperatorFacts::overwrites},
    {"aten::masked_fill_", &OperatorFacts::overwrites},
    {"aten::masked_scatter_", &OperatorFacts::overwrites},
    {"aten::_foreach_copy_", &OperatorFacts::overwrites},
    {"aten::_foreach_zero_", &OperatorFacts::overwrites},
};

// Results whose bytes no kernel, or not that of every backend, fills in every case. Workspaces that a
// forward leaves for its backward: the first is what the zoo found on a CPU; the others are results that
// the schemas call reserve, rng_state and the like. And what some arguments leave without a meaning: the
// seed and the offset of an attention without dropout, the total weight of a loss that is not reduced,
// sizes and maxima of bags that are summed.
struct Unspecified {
  std::string_view name;
  std::uint32_t results;
};
constexpr std::array<Unspecified, 16> kUnspecified{{
    {"aten::mkldnn_rnn_layer", 1U << 3U},
    {"aten::_cudnn_rnn", 1U << 3U},
    {"aten::miopen_rnn", 1U << 3U},
    {"aten::cudnn_batch_norm", 1U << 3U},
    {"aten::_batch_norm_with_update", 1U << 3U},
    {"aten::_scaled_dot_product_flash_attention", 7U << 6U},
    {"aten::_scaled_dot_product_cudnn_attention", 7U << 6U},
    {"aten::_scaled_dot_product_fused_attention_overrideable", 7U << 6U},
    {"aten::_scaled_dot_product_efficient_attention", 3U << 2U},
    {"aten::_flash_attention_forward", 7U << 2U},
    {"aten::_cudnn_attention_forward", 7U << 6U},
    {"aten::_efficient_attention_forward", 3U << 2U},
    {"aten::_embedding_bag", 7U << 1U},
    {"aten::_embedding_bag_forward_only", 7U << 1U},
    {"aten::nll_loss_forward", 1U << 1U},
    {"aten::nll_loss2d_forward", 1U << 1U},
}};

std::uint32_t unspecified_results(std::string_view name, bool leaves_raw) {
  if (leaves_raw || name.starts_with("aten::resize") || name == kResize) return ~0U;
  for (const Unspecified& entry : kUnspecified) {
    if (entry.name == name) return entry.results;
  }
  return 0;
}

bool mentions_tensor(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::TensorType) return true;
  const auto contained = type.containedTypes();
  return std::any_of(contained.begin(), contained.end(),
                     [](const c10::TypePtr& t) { return mentions_tensor(*t); });
}

OperatorFacts read_facts(const c10::OperatorHandle& op) {
  OperatorFacts facts;
  const c10::FunctionSchema& schema = op.schema();
  const std::string& name = schema.name();
  for (const Exception& exception : kExceptions) {
    if (exception.name == name) facts.*exception.fact = true;
  }

  const auto& arguments = schema.arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite()) facts.writes.push_back(static_cast<std::uint8_t>(i));
  }
  bool any_alias = false;
  for (const c10::Argument& result : schema.returns()) {
    const c10::AliasInfo* alias = result.alias_info();
    any_alias |= alias != nullptr;
    facts.makes_fresh |= alias == nullptr && mentions_tensor(*result.real_type());
  }
  facts.changes_metadata = op.hasTag(at::Tag::inplace_view) && !name.starts_with("aten::resize");
  facts.is_view |= any_alias && facts.writes.empty() && !facts.makes_fresh;
  // See Note [Writes that schemas do not mention]
  for (const HiddenWrite& hidden : kHiddenWrites) {
    if (hidden.name != name) continue;
    facts.training_argument = hidden.training_argument;
    auto& writes = hidden.training_argument < 0 ? facts.writes : facts.training_writes;
    for (const std::uint8_t argument : hidden.arguments) {
      facts.writes.erase(std::remove(facts.writes.begin(), facts.writes.end(), argument),
                         facts.writes.end());
      writes.push_back(argument);
    }
  }
  facts.writes_aside = writes_statistics_aside(name);
  // See Note [Collectives go on after they return]
  facts.communicates = std::any_of(kCommunication.begin(), kCommunication.end(),
                                   [&](std::string_view prefix) { return name.starts_with(prefix); });
  facts.ends_work = facts.communicates && name.ends_with("::wait_tensor");
  facts.waits_for_ranks = facts.ends_work || name == "c10d::barrier" || name == "c10d::monitored_barrier_";
  if (name.starts_with("c10d::") && name != "c10d::send") {
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      if (!mentions_tensor(*arguments[i].real_type()) || arguments[i].name().starts_with("input")) {
        continue;
      }
      facts.writes.push_back(static_cast<std::uint8_t>(i));
    }
  }
  if (facts.changes_metadata || facts.is_view) facts.writes.clear();
  // See Note [Writes that nobody counts]
  facts.writes_uncounted = facts.may_write() &&
                           !op.hasKernelForDispatchKey(c10::DispatchKey::ADInplaceOrView) &&
                           !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
                           !name.starts_with("aten::_foreach_");
  facts.may_count_first = !facts.writes.empty() && !name.starts_with("aten::") &&
                          op.hasKernelForDispatchKey(c10::DispatchKey::ADInplaceOrView);
  const auto tensors = std::count_if(arguments.begin(), arguments.end(), [](const auto& a) {
    return mentions_tensor(*a.real_type());
  });
  facts.reads_shapes_only = tensors == 1 && name.starts_with("aten::") &&
                            (name.ends_with("_like") || name.starts_with("aten::new_"));
  // See Note [Uninitialised memory is kept]
  facts.leaves_raw = name.starts_with("aten::empty") || name.starts_with("aten::new_empty");
  facts.unspecified = unspecified_results(name, facts.leaves_raw);
  facts.overwrites |=
      std::any_of(arguments.begin(), arguments.end(), [](const auto& a) { return a.is_out(); }) ||
      (op.hasTag(at::Tag::nondeterministic_seeded) && facts.may_write());
  facts.draws_random =
      op.hasTag(at::Tag::nondeterministic_seeded) ||
      std::find(kRandomPrims.begin(), kRandomPrims.end(), name) != kRandomPrims.end();
  facts.may_draw = !facts.draws_random && !facts.is_view && !name.starts_with("aten::") && !name.starts_with("prims::");
  facts.dynamic_shape = op.hasTag(at::Tag::dynamic_output_shape);
  facts.never_replayed |= op.hasTag(at::Tag::nondeterministic_bitwise) || facts.communicates;
  facts.selects_backend = op.hasKernelForDispatchKey(c10::DispatchKey::BackendSelect);
  facts.work = work_of(name);
  facts.races = races_of(name);
  facts.is_plain_view = facts.is_view && !facts.announces_read && !facts.announces_address &&
                        !facts.changes_metadata && !facts.ends_filling && !facts.communicates;
  return facts;
}

}  // namespace

std::shared_ptr<const OperatorFacts> facts_of(const c10::OperatorHandle& op) {
  using Facts = std::shared_ptr<const OperatorFacts>;
  thread_local ska::flat_hash_map<const c10::FunctionSchema*, Facts> known;
  thread_local std::uint64_t known_generation = 0;
  // See Note [Operators are known by an address]
  if (const std::uint64_t now = operator_generation(); now != known_generation) {
    known.clear();
    known_generation = now;
  }
  Facts& entry = known[&op.schema()];
  if (!entry) entry = std::make_shared<const OperatorFacts>(read_facts(op));
  return entry;
}

std::uint64_t operator_generation() { return generation.load(std::memory_order_relaxed); }
void end_operator_generation() { ++generation; }

}  // namespace rematfn
