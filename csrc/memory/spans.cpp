// SPDX-License-Identifier: Apache-2.0
#include "memory/spans.h"

#include <algorithm>
#include <new>
#include <utility>

#include "memory/system_pages.h"

namespace rematfn {
namespace {

constexpr std::size_t kLeastRange = std::size_t{64} << 20;
// Where addresses are dear a larger block has a range to itself, which would have no room for a second.
constexpr std::size_t kSharesRange = kLeastRange / 4;
constexpr std::size_t kMostRange = std::size_t{1} << 40;
constexpr int kTried = 32;        // spans or holes among which the best is looked for
constexpr int kSpareSpans = 64;   // made at once

}  // namespace

Spans::~Spans() { unmap_unused(/*waiting_too=*/true); }

// ---- blocks -----------------------------------------------------------------------------------

Span* Spans::allocate(std::size_t nbytes, Gone& gone) {
  if (nbytes > kMostRange || !have_spare(3)) return nullptr;
  nbytes = whole_pages(nbytes);
  Place place = find(nbytes);
  if (place.hole == nullptr) {
    if (!reserve(nbytes)) return nullptr;
    place = find(nbytes);
  }
  Span& span = take(place, nbytes, gone);
  span.range->blocks[(span.begin - span.range->begin) / kPage] = &span;
  return &span;
}

Span* Spans::find_block(const void* address) const {
  Range* range = range_of(address);
  if (range == nullptr) return nullptr;
  return range->blocks[(static_cast<const char*>(address) - range->begin) / kPage];
}

void Spans::free(Span& block) {
  block.range->blocks[(block.begin - block.range->begin) / kPage] = nullptr;
  usage_.live -= block.nbytes;
  if (block.before != nullptr && block.before->is_free()) unfile_hole(first_of_hole(*block.before));
  if (block.after != nullptr && block.after->is_free()) unfile_hole(*block.after);
  block.state = Span::kWaiting;
  Span& whole = merged(block);
  let_wait(whole, latest_used_);
  file_hole(first_of_hole(whole));
}

Spans::Place Spans::find(std::size_t nbytes) const {
  Span* best = nullptr;
  std::size_t found_in = 0;
  int tried = 0;
  waiting_.visit_from(nbytes, [&](Span& span, std::size_t list) {
    if (best != nullptr && list != found_in) return true;
    if (span.nbytes >= nbytes && (best == nullptr || span.nbytes < best->nbytes)) {
      best = &span;
      found_in = list;
    }
    return best != nullptr && ++tried >= kTried;
  });
  if (best != nullptr) return {&first_of_hole(*best), best->begin};

  Place place;
  std::size_t most = 0;
  tried = 0;
  holes_.visit_from(nbytes, [&](Span& hole, std::size_t) {
    if (hole.hole < nbytes) return false;
    const Place here = best_in(hole, nbytes, most);
    if (here.hole != nullptr) place = here;
    if (place.hole == nullptr) place = {&hole, begin_in(hole, nbytes)};
    return ++tried >= kTried;
  });
  return place;
}

// In front, but so that huge pages fit if addresses cost nothing.
char* Spans::begin_in(const Span& hole, std::size_t nbytes) const {
  const std::size_t ahead = ahead_of_huge_page(hole.begin);
  const bool aligned = cheap_addresses_ && nbytes >= huge_page() && ahead <= hole.hole - nbytes;
  return aligned ? hole.begin + ahead : hole.begin;
}

// Bytes of [begin, begin + nbytes), which lies in `hole`, that are resident.
std::size_t Spans::covered(const Span& hole, const char* begin, std::size_t nbytes) {
  const char* end = begin + nbytes;
  std::size_t sum = 0;
  for (const Span* s = &hole; s != nullptr && s->is_free() && s->begin < end; s = s->after) {
    if (s->state != Span::kWaiting || s->end() <= begin) continue;
    sum += static_cast<std::size_t>(std::min<const char*>(s->end(), end) -
                                    std::max<const char*>(s->begin, begin));
  }
  return sum;
}

// Where in `hole` more than `most` bytes are resident, which are then so many; or nowhere.
Spans::Place Spans::best_in(Span& hole, std::size_t nbytes, std::size_t& most) {
  Place best;
  char* const last = hole.begin + hole.hole - nbytes;
  int tried = 0;
  for (Span* s = &hole; s != nullptr && s->is_free() && tried < kTried; s = s->after) {
    if (s->state != Span::kWaiting) continue;
    ++tried;
    char* const ends_here = s->nbytes <= nbytes ? s->end() - nbytes : s->begin;
    for (char* begin : {s->begin, ends_here}) {
      begin = std::clamp(begin, hole.begin, last);
      const std::size_t bytes = covered(hole, begin, nbytes);
      if (bytes <= most) continue;
      most = bytes;
      best = {&hole, begin};
    }
  }
  return best;
}

Span& Spans::take(const Place& place, std::size_t nbytes, Gone& gone) {
  unfile_hole(*place.hole);
  Span* span = place.hole;
  while (span->end() <= place.begin) span = span->after;
  if (span->begin < place.begin) {
    span = &split(*span, static_cast<std::size_t>(place.begin - span->begin));
  }
  for (std::size_t left = nbytes; left > 0;) {
    Span& part = left == nbytes ? *span : *span->after;
    if (part.nbytes > left) split(part, left);
    if (part.state == Span::kWaiting) {
      end_wait(part);
    } else if (gone.count < gone.parts.size()) {
      gone.parts[gone.count++] = {part.begin, part.nbytes};
    }
    part.state = Span::kLive;
    left -= part.nbytes;
    if (&part != span) absorb_next(*span);
  }
  usage_.live += nbytes;
  huge_.note_handed_out(nbytes);
  Range& range = *span->range;
  range.used = std::max(range.used, span->end());
  if (span->before != nullptr && span->before->is_free()) file_hole(first_of_hole(*span->before));
  if (span->after != nullptr && span->after->is_free()) file_hole(*span->after);
  return *span;
}

// ---- what waits -------------------------------------------------------------------------------

Span& Spans::longest_unused(std::size_t nbytes) {
  if (longest_unused_->nbytes > nbytes && have_spare(1)) split(*longest_unused_, nbytes);
  return *longest_unused_;
}

void Spans::give_back(Span& waiting) {
  const auto parts = [](const Span* s) {
    if (s == nullptr || s->state != Span::kGone) return std::size_t{0};
    return s->nbytes - bytes_in_huge_pages(s->begin, s->nbytes);
  };
  const std::size_t before = parts(waiting.before) + parts(waiting.after);
  moves_.give_back(waiting.stretch());
  huge_.note_given_back(before, parts(&is_gone(waiting)));
}

// Returns it, joined with its neighbours.
Span& Spans::is_gone(Span& span) {
  unfile_hole(first_of_hole(span));
  end_wait(span);
  span.state = Span::kGone;
  Span& whole = merged(span);
  file_hole(first_of_hole(whole));
  return whole;
}

void Spans::move_to(const Span& block, Gone& gone, std::size_t excess) {
  Range& range = *block.range;
  notice_limits();
  if (!cheap_addresses_ || range.origins.inherited) return;
  for (std::size_t i = 0; i < gone.count; ++i) {
    Gone::Part& part = gone.parts[i];
    while (std::min(excess, part.nbytes) >= PageMoves::kLeastPages * kPage) {
      if (!moves_.may_move()) return;
      Span& span = longest_unused(std::min(excess, part.nbytes));
      if (span.nbytes > part.nbytes) return;  // it could not be split
      const std::size_t nbytes = span.nbytes;
      excess -= std::min(excess, nbytes);
      const bool few = nbytes < PageMoves::kLeastPages * kPage;
      if (few || span.range->origins.inherited) {
        give_back(span);
        continue;
      }
      const bool moved = moves_.move(span.stretch(), range.stretch(part.begin, nbytes));
      is_gone(span);
      if (!moved) return;
      part.begin += nbytes;
      part.nbytes -= nbytes;
      usage_.moved += nbytes;
    }
  }
}

// ---- spans ------------------------------------------------------------------------------------

bool Spans::have_spare(int count) {
  for (Span* s = spare_; s != nullptr; s = s->after) {
    if (--count <= 0) return true;
  }
  void* memory = map_pages(whole_pages(kSpareSpans * sizeof(Span)));
  if (memory == nullptr) return false;
  for (int i = 0; i < kSpareSpans; ++i) {  // these stay
    Span* span = new (static_cast<Span*>(memory) + i) Span;
    span->after = std::exchange(spare_, span);
  }
  return true;
}

Stretch Range::stretch(char* from, std::size_t count) {
  return {from, count, &origins, static_cast<std::size_t>(from - begin) / kPage};
}

Stretch Span::stretch() const { return range->stretch(begin, nbytes); }

// Cuts `span` after `nbytes`; returns the rest.
Span& Spans::split(Span& span, std::size_t nbytes) {
  Span& rest = *std::exchange(spare_, spare_->after);
  rest.begin = span.begin + nbytes;
  rest.nbytes = span.nbytes - nbytes;
  rest.state = span.state;
  rest.range = span.range;
  rest.before = &span;
  rest.after = span.after;
  if (span.after != nullptr) span.after->before = &rest;
  span.after = &rest;
  if (span.state != Span::kWaiting) {
    span.nbytes = nbytes;
    return rest;
  }
  Span* older = span.by_use.previous;
  end_wait(span);
  span.nbytes = nbytes;
  let_wait(span, older);
  let_wait(rest, &span);
  return rest;
}

void Spans::absorb_next(Span& span) {
  Span& next = *span.after;
  span.nbytes += next.nbytes;
  span.after = next.after;
  if (next.after != nullptr) next.after->before = &span;
  next.after = std::exchange(spare_, &next);
}

// `span`, which is free and does not wait yet, with its neighbours of the same state.
Span& Spans::merged(Span& span) {
  Span* first = &span;
  if (span.before != nullptr && span.before->state == span.state) {
    first = span.before;
    if (first->state == Span::kWaiting) end_wait(*first);
    absorb_next(*first);
  }
  if (first->after != nullptr && first->after->state == first->state) {
    if (first->state == Span::kWaiting) end_wait(*first->after);
    absorb_next(*first);
  }
  return *first;
}

// From now on it waits, and has been used just after `older`; null: before all.
void Spans::let_wait(Span& span, Span* older) {
  span.by_use = {older, older == nullptr ? longest_unused_ : older->by_use.next};
  (older == nullptr ? longest_unused_ : older->by_use.next) = &span;
  (span.by_use.next == nullptr ? latest_used_ : span.by_use.next->by_use.previous) = &span;
  waiting_.put(span);
  usage_.waiting += span.nbytes;
}

void Spans::end_wait(Span& span) {
  const auto [older, newer] = span.by_use;
  (older == nullptr ? longest_unused_ : older->by_use.next) = newer;
  (newer == nullptr ? latest_used_ : newer->by_use.previous) = older;
  waiting_.remove(span);
  usage_.waiting -= span.nbytes;
}

Span& Spans::first_of_hole(Span& span) {
  Span* first = &span;
  while (first->before != nullptr && first->before->is_free()) first = first->before;
  return *first;
}

void Spans::file_hole(Span& first) {
  first.hole = 0;
  for (const Span* s = &first; s != nullptr && s->is_free(); s = s->after) first.hole += s->nbytes;
  holes_.put(first);
}

void Spans::unfile_hole(Span& first) { holes_.remove(first); }

// ---- addresses --------------------------------------------------------------------------------

bool Spans::reserve(std::size_t nbytes) {
  cheap_addresses_ = !addresses_are_dear();
  if (!cheap_addresses_) {
    do {
      if (nbytes <= kSharesRange && map(kLeastRange)) return true;
      if (map(nbytes)) return true;
    } while (unmap_unused(/*waiting_too=*/true));
    return false;
  }
  for (std::size_t size = std::clamp(4 * bytes_of_memory(), kLeastRange, kMostRange); size >= kLeastRange;
       size /= 2) {
    if (size >= nbytes && map(whole_pages(size))) return true;
  }
  return map(nbytes);
}

bool Spans::map(std::size_t nbytes) {
  if (!have_spare(1)) return false;
  // In front of the pages there is the range itself, and blocks and origins by page.
  const std::size_t count = nbytes / kPage;
  const std::size_t ahead =
      whole_pages(sizeof(Range) + count * sizeof(Span*) + (count + 2) * sizeof(std::ptrdiff_t));
  auto* memory = static_cast<char*>(map_pages(ahead + nbytes));
  if (memory == nullptr) return false;
  char* begin = memory + ahead;
  want_small_pages(memory, ahead + nbytes);
  Span* span = std::exchange(spare_, spare_->after);
  auto* blocks = reinterpret_cast<Span**>(memory + sizeof(Range));
  const Origins origins{reinterpret_cast<std::ptrdiff_t*>(blocks + count) + 1};
  ranges_ = new (memory) Range{begin, nbytes, blocks, span, ranges_, origins, begin};
  *span = Span();
  span->begin = begin;
  span->nbytes = nbytes;
  span->range = ranges_;
  file_hole(*span);
  usage_.reserved += nbytes;
  const auto low = reinterpret_cast<std::uintptr_t>(begin);
  lowest_ = std::min(lowest_.load(), low);
  highest_ = std::max(highest_.load(), low + nbytes);
  return true;
}

// All of its pages are gone.
void Spans::unmap(Range& range) {
  Range** link = &ranges_;
  while (*link != &range) link = &(*link)->next;
  *link = range.next;
  unfile_hole(*range.first);
  range.first->after = std::exchange(spare_, range.first);
  usage_.reserved -= range.nbytes;
  moves_.forget(range.origins);
  char* end = range.begin + range.nbytes;
  munmap(&range, static_cast<std::size_t>(end - reinterpret_cast<char*>(&range)));
}

bool Spans::unmap_unused(bool waiting_too) {
  bool any = false;
  for (Range* range = ranges_; range != nullptr;) {
    Range* next = range->next;
    Span* const first = range->first;
    if (first->is_free() && first->hole == range->nbytes) {
      for (Span* s = first; waiting_too && s != nullptr;) {
        const bool waits = s->state == Span::kWaiting;
        if (waits) give_back(*s);  // it may now be part of the span before
        s = waits ? first->after : s->after;
      }
      if (first->state == Span::kGone && first->nbytes == range->nbytes) {
        unmap(*range);
        any = true;
      }
    }
    range = next;
  }
  if (is_empty()) huge_.begin_anew();
  return any;
}

Range* Spans::range_of(const void* block) const {
  const auto* address = static_cast<const char*>(block);
  Range* range = ranges_;
  while (range != nullptr &&
         (address < range->begin || address >= range->begin + range->nbytes)) {
    range = range->next;
  }
  return range;
}

// ---- what holds -------------------------------------------------------------------------------

Spans::Usage Spans::usage() const {
  Usage usage = usage_;
  usage.cuts = moves_.cuts();
  return usage;
}

void Spans::inherit() {
  for (Range* range = ranges_; range != nullptr; range = range->next) range->origins.inherited = true;
}

}  // namespace rematfn
