// SPDX-License-Identifier: Apache-2.0
//
// named_storages.h: what storages are called, by those who empty them, for messages.

#pragma once

#include <c10/core/Storage.h>

#include <string>

namespace rematfn {

// Any thread.
void name_storage(const c10::Storage& storage, std::string name);
// Empty, if it has none.
[[nodiscard]] std::string name_of(const c10::Storage& storage);

}  // namespace rematfn
