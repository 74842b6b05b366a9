// SPDX-License-Identifier: Apache-2.0
//
// contents_watch.h: finds contents that change without a recorded write. For tests.
//
// Note [Contents change by operators alone]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// What a version holds is what its producer made; else a replay gives other values, without a word. A
// kernel that runs above us can break that: it takes an address and writes, and no operator has
// done it. So does an operator whose schema does not mention a write. No list of these is ever known to be
// complete. So tests may have all resident contents hashed wherever an operator of the program begins
// or ends, composite ones included. A version whose hash has changed between two such places, while it
// stayed where it was, names them. Left out is what may be written by address: uninitialised memory,
// and what somebody has the address of.

#pragma once

#include <string>
#include <vector>

namespace rematfn {

// From now on; or no more.
void watch_contents(bool on);
// What was found since the watch began, a sentence for each.
[[nodiscard]] std::vector<std::string> changed_contents();

}  // namespace rematfn
