// SPDX-License-Identifier: Apache-2.0
#include "operators/raw_access.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "levels/level.h"
#include "levels/refusals.h"
#include "tensors/layers.h"
#include "tensors/level_tensor.h"

namespace rematfn {
namespace {

// Makes all resident, and hands the versions of each domain, whose lock is held, to `use`.
template <class Use>
void bring_all_back(const std::vector<at::Tensor>& tensors, const std::string& reader,
                    const Use& use) {
  std::vector<at::Tensor> asked;
  for (const at::Tensor& tensor : tensors) {
    for_each_innermost(tensor, [&](const at::Tensor& inner) { asked.push_back(inner); });
  }
  std::vector<std::shared_ptr<Domain>> domains;  // nearly always there is one
  for (const at::Tensor& tensor : asked) {
    auto domain = domain_of(*tensor.unsafeGetTensorImpl());
    const bool known = std::find(domains.begin(), domains.end(), domain) != domains.end();
    if (domain && !known) domains.push_back(std::move(domain));
  }
  for (const std::shared_ptr<Domain>& domain : domains) {
    const DomainLock lock(domain);
    std::vector<Version*> wanted;
    Level* level = nullptr;
    for (const at::Tensor& tensor : asked) {
      if (domain_of(*tensor.unsafeGetTensorImpl()) != domain) continue;
      const Cell* cell = cell_of(*tensor.unsafeGetTensorImpl());
      level = &level_of(*cell);
      wanted.push_back(cell->version.get());
    }
    if (level == nullptr) continue;
    materialize_for(*level, wanted, reader);
    level->tensor_domain().streams.settle();
    use(level->tensor_domain(), wanted);
  }
}

}  // namespace

void materialize(const std::vector<at::Tensor>& tensors, const std::string& reader) {
  bring_all_back(tensors, reader, [](TensorDomain& domain, const std::vector<Version*>& versions) {
    for (Version* version : versions) {
      domain.observers.note(Trace::What::kRead, *version);
      version->exposed = domain.next_order;
    }
  });
}

void keep_bytes(const std::vector<at::Tensor>& tensors, const std::string& reader, bool addressed) {
  bring_all_back(tensors, reader, [&](TensorDomain& domain, const std::vector<Version*>& versions) {
    for (Version* version : versions) {
      if (addressed) {
        domain.note_addressed(*version);
        static_cast<TensorVersion*>(version)->note_readers();
      }
      if (version->producer) keep_contents(domain, *version);
    }
  });
}

void note_array(const at::Tensor& tensor) {
  for_each_innermost(tensor, [&](const at::Tensor& inner) {
    with_cell(inner, [](Cell& cell) { cell.version->note_array(); });
  });
}

void keep_contents(Domain& domain, Version& version) {
  domain.observers.note(Trace::What::kFilled, version);
  if (version.producer) domain.cut(version);
}

void materialize_storage(const c10::Storage& storage) {
  Cell* cell = cell_evicted_from(*storage.unsafeGetStorageImpl());
  if (cell != nullptr) materialize({bytes_of(storage, *cell)}, "materialize(x)");
}

void keep_storage(const c10::Storage& storage) {
  at::Tensor bytes;
  for_each_live_domain([&](TensorDomain& domain) {
    Cell* cell = bytes.defined() ? nullptr : domain.cell_on(*storage.unsafeGetStorageImpl());
    if (cell != nullptr) bytes = bytes_of(storage, *cell);
  });
  if (bytes.defined()) keep_bytes({bytes}, "a storage that is written", /*addressed=*/true);
}

}  // namespace rematfn
