// SPDX-License-Identifier: Apache-2.0
//
// outside.h: contents that no level made, which operations have read: what tells that they changed.
//
// Note [Contents are found by their counter]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// After `x.data = y` the tensor has another storage and its old counter. A write to it bumps that
// counter, and what was read from the old storage would seem to be overwritten. So those whose
// counter an operator bumps are found by that counter: by address_of() it, in by_counter_.

// Note [What the program drops beside operators]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A function may read weights from files as it goes (`torch.load`), or make tensors of arrays, and drop each
// when it is done with it. No operator made them, so nobody tells when the program has dropped one; and lineage
// would hold all of them to the end of the call. So storages are looked through for those that nobody but lineage
// holds, each time that what has been read since comes to a quarter of what was held then. What was made from them
// becomes constants, as for a constant of a level's that is dropped. Within a budget that could take more from
// evictions than it gives: what has been made of bytes, as floats, may go and be made again. So there it is done only
// for what is smaller than the storage, and for the rest where nothing else makes room.

#pragma once

#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/flat_hash_map.h>

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "engine/lineage.h"
#include "tensors/contents.h"

namespace rematfn {

class TensorDomain;
struct TensorVersion;

class OutsideContents {
 public:
  explicit OutsideContents(TensorDomain& domain) : domain_(domain) {}

  // The contents of a tensor that no level made, as of now. `read`: an operation that is recorded
  // is about to read them.
  Ref<TensorVersion> version_of(c10::TensorImpl& tensor, bool read = false);
  // The same for one whose contents are `version`, from outside.
  void note_read(const TensorVersion& version, const c10::TensorImpl& tensor);
  // What operations have read of a storage, if it is still there; else null. What is known to have
  // been overwritten is forgotten, and cannot be replayed from any more. The operator that asks may
  // have moved the counter by `bumps` already.
  [[nodiscard]] TensorVersion* known(const c10::StorageImpl& storage, std::uint32_t bumps = 0);
  // What has become of contents that an operation has read by `view`: a message, or null if they are
  // there as they were. See Note [Evidence of contents].
  [[nodiscard]] const char* change_of(TensorVersion& version, const View& view);
  // Whether recorded operations have read the storage.
  [[nodiscard]] bool has_read(const c10::StorageImpl& storage) const {
    return by_storage_.find(&storage) != by_storage_.end();
  }
  // A storage is about to be resized, or moved, where no level sees it.
  void note_resize(const c10::StorageImpl& storage);
  // It is about to be written, and nothing that an operation has read is lost by that.
  void note_write(const c10::StorageImpl& storage);
  // It is about to be written, and what operations have read there is lost.
  void forget(const c10::StorageImpl& storage, bool for_want_of_room = false);
  // From now on the counter of `tensor`, if it has one, tells whether `version` was overwritten.
  void note_counter(TensorVersion& version, c10::TensorImpl& tensor);
  // The version counter of `tensor` is about to be bumped, once the running operator returns. Known
  // contents have not changed by that: the operator changes what is none of them, or they are of
  // another storage or a copy by now.
  void expect_bump(c10::TensorImpl& tensor);
  // The operator moves `tensor` to another storage: its counter says nothing of this one any more.
  void expect_move(const c10::TensorImpl& tensor);
  // It has been bumped by now.
  void note_bumps();
  // See Note [What the program drops beside operators]
  void release_dropped_at_times(bool is_bounded) {
    constexpr std::size_t kFew = std::size_t{256} << 10;
    if (read_since_ > held_ / 4 + kFew) [[unlikely]] release_dropped(/*weighs=*/is_bounded);
  }
  void release_dropped(bool weighs);
  // `version`, whose storage is its own, is from outside from now on.
  void add(TensorVersion& version);
  void erase(TensorVersion& version);
  // The same for one that nothing refers to any more: its contents are there still.
  void bury(TensorVersion& version);

 private:
  // The version holds the storage, so the address that this is found by cannot be reused.
  struct Entry {
    TensorVersion* version = nullptr;
    Contents contents;
  };

  // What a record calls the contents of a storage that no lineage refers to any more. Which lineage is
  // left differs from call to call, and the record must not.
  struct Name {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
    std::uint32_t value = kNoValue;
    std::uint32_t recorded = kNoValue;
  };

  // Where it stands, or null.
  [[nodiscard]] Entry* entry_of(const TensorVersion& version);
  void drop_counter(TensorVersion& version);
  void take_name(TensorVersion& version);
  void check_resized(Entry& entry);
  [[nodiscard]] bool has_moved_counter(const TensorVersion& version, std::uint32_t bumps = 0) const;
  [[nodiscard]] static bool agrees_with_readers(const Entry& entry);

  TensorDomain& domain_;
  ska::flat_hash_map<const c10::StorageImpl*, Entry> by_storage_;
  ska::flat_hash_map<const c10::StorageImpl*, Name> names_;
  std::unordered_multimap<const void*, TensorVersion*> by_counter_;
  std::vector<Ref<TensorVersion>> bumped_;
  std::size_t held_ = 0;        // bytes, when they were last looked through
  std::size_t read_since_ = 0;  // bytes that were read for the first time since
};

}  // namespace rematfn
