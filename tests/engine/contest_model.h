// SPDX-License-Identifier: Apache-2.0
//
// contest_model.h: tests of plans that calls decide between.

#pragma once

namespace rematfn {

void a_contest();
void contests(unsigned count);

}  // namespace rematfn
