// SPDX-License-Identifier: Apache-2.0
//
// See Note [Huge pages, where all of one is wanted]
#include "memory/spans.h"

#include <algorithm>

#include "memory/system_pages.h"

namespace rematfn {

bool Spans::makes_huge(const Gone& gone) {
  if (huge_.are_worn(usage_.live + usage_.waiting)) return false;
  std::size_t whole = 0;
  for (std::size_t i = 0; i < gone.count; ++i) {
    whole += bytes_in_huge_pages(gone.parts[i].begin, gone.parts[i].nbytes);
  }
  huge_.note_made(whole);
  return whole > 0;
}

void Spans::Gone::populate(bool huge) const {
  for (std::size_t i = 0; i < count; ++i) {
    const auto [begin, nbytes] = parts[i];
    if (nbytes == 0) continue;
    huge ? populate_with_huge_pages(begin, nbytes) : populate_pages(begin, nbytes);
  }
}

void Spans::renew_huge_pages() {
  for (Range* range = ranges_; range != nullptr; range = range->next) renew(*range);
  huge_.begin_anew();
}

void Spans::renew(Range& range) {
  for (Span* s = range.first; s != nullptr; s = s->after) {
    if (s->state != Span::kWaiting) continue;
    if (range.origins.inherited) moves_.give_back(s->stretch());
    s = &is_gone(*s);
  }
  if (range.origins.inherited) return;
  const auto huge = static_cast<std::ptrdiff_t>(huge_page());
  // Anew, also where nothing waited: where small pages have been the system has tables of them, as long
  // as addresses nearby are mapped.
  for (Span* s = range.first; s != nullptr && s->begin < range.used; s = s->after) {
    if (s->state != Span::kGone) continue;
    char* const end = s->end() - range.used > huge ? range.used + huge : s->end();
    moves_.map_anew(range.stretch(s->begin, static_cast<std::size_t>(end - s->begin)));
  }
}

}  // namespace rematfn
