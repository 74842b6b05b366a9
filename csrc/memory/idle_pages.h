// SPDX-License-Identifier: Apache-2.0
//
// idle_pages.h: gives back the pages that are kept between calls, once no call comes any more.

#pragma once

namespace rematfn {

// From now on pages are kept for ten seconds; if a level with a budget comes meanwhile, for as long as
// it lives, and then anew.
void keep_pages_for_a_while();

}  // namespace rematfn
