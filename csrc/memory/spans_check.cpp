// SPDX-License-Identifier: Apache-2.0

#include "base/invariant.h"
#include "memory/spans.h"

namespace rematfn {
void Spans::check() const {
  Usage sum;
  for (const Range* range = ranges_; range != nullptr; range = range->next) {
    const char* at = range->begin;
    for (const Span* s = range->first; s != nullptr; s = s->after) {
      require_invariant(s->begin == at && s->range == range, "P1: spans lie side by side");
      require_invariant(s->before == nullptr ? s == range->first : s->before->after == s, "P1: are linked");
      if (s->before != nullptr && s->is_free()) {
        require_invariant(s->before->state != s->state, "P1: alike neighbours are one span");
      }
      require_invariant((range->blocks[(at - range->begin) / kPage] == s) == !s->is_free(),
              "P1: a block is found by its address");
      if (s->is_free() && (s->before == nullptr || !s->before->is_free())) {
        std::size_t hole = 0;
        for (const Span* t = s; t != nullptr && t->is_free(); t = t->after) hole += t->nbytes;
        require_invariant(s->hole == hole, "P2: a hole is filed under its bytes");
        bool filed = false;
        holes_.visit_from(hole, [&](Span& t, std::size_t) { return filed = &t == s; });
        require_invariant(filed, "P2: a hole is filed");
      }
      if (s->state == Span::kLive) sum.live += s->nbytes;
      if (s->state == Span::kWaiting) sum.waiting += s->nbytes;
      at = s->end();
    }
    require_invariant(at == range->begin + range->nbytes, "P1: spans fill their range");
    sum.reserved += range->nbytes;
  }
  std::size_t waiting = 0;
  const Span* older = nullptr;
  for (const Span* s = longest_unused_; s != nullptr; older = s, s = s->by_use.next) {
    require_invariant(s->by_use.previous == older && s->state == Span::kWaiting, "P3: what waits is linked");
    waiting += s->nbytes;
  }
  require_invariant(latest_used_ == older && waiting == sum.waiting, "P3: all that waits is linked");
  require_invariant(sum.live == usage_.live && sum.waiting == usage_.waiting, "P3: what waits is counted");
  require_invariant(sum.reserved == usage_.reserved, "P1: ranges are counted");
}

}  // namespace rematfn
