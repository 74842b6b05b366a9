// SPDX-License-Identifier: Apache-2.0
//
// setting_names.h: what torch's users call its settings.

#pragma once

#include <string>
#include <utility>
#include <vector>

namespace rematfn {

// Names and present values, always of the same settings in the same order.
[[nodiscard]] std::vector<std::pair<std::string, std::string>> describe_settings();

}  // namespace rematfn
