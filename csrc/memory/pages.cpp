// SPDX-License-Identifier: Apache-2.0
#include "memory/pages.h"

#include <algorithm>
#include <new>
#include <stdexcept>
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

void require(bool holds, const char* invariant) {
  if (!holds) throw std::logic_error(invariant);
}

}  // namespace

REMATFN_THREAD_LOCAL int WillBeFilled::depth_ = 0;

Pages& pages() {
  static auto* const pool = new Pages;  // outlives the tensors of a dying process
  return *pool;
}

// ---- spans by size ----------------------------------------------------------------------------

template <Pages::Links Pages::Span::*links, std::size_t Pages::Span::*size>
std::size_t Pages::Shelf<links, size>::list_of(std::size_t nbytes) {
  const std::size_t pages = nbytes / kPage;
  const std::size_t log = std::bit_width(pages) - 1;
  const std::size_t quarter = log >= 2 ? (pages >> (log - 2)) & 3 : (pages << (2 - log)) & 3;
  return 4 * log + quarter;
}

template <Pages::Links Pages::Span::*links, std::size_t Pages::Span::*size>
void Pages::Shelf<links, size>::put(Span& span) {
  const std::size_t list = list_of(span.*size);
  Span* next = first_[list];
  span.*links = {nullptr, next};
  if (next != nullptr) (next->*links).previous = &span;
  first_[list] = &span;
  filled_[list / 64] |= std::uint64_t{1} << list % 64;
}

template <Pages::Links Pages::Span::*links, std::size_t Pages::Span::*size>
void Pages::Shelf<links, size>::remove(Span& span) {
  const auto [previous, next] = span.*links;
  if (next != nullptr) (next->*links).previous = previous;
  if (previous != nullptr) {
    (previous->*links).next = next;
    return;
  }
  const std::size_t list = list_of(span.*size);
  first_[list] = next;
  if (next == nullptr) filled_[list / 64] &= ~(std::uint64_t{1} << list % 64);
}

template <Pages::Links Pages::Span::*links, std::size_t Pages::Span::*size>
template <class Visit>
void Pages::Shelf<links, size>::visit_from(std::size_t nbytes, Visit visit) const {
  std::size_t list = list_of(nbytes);
  for (; list < first_.size(); ++list) {
    const std::uint64_t rest = filled_[list / 64] >> list % 64;
    if (rest == 0) {
      list |= 63;  // the next word
      continue;
    }
    list += static_cast<std::size_t>(std::countr_zero(rest));
    for (Span* s = first_[list]; s != nullptr; s = (s->*links).next) {
      if (visit(*s, list)) return;
    }
  }
}

// ---- tenants ----------------------------------------------------------------------------------

void Pages::enter(Tenant& tenant) {
  const std::lock_guard guard(mutex_);
  tenant.next_ = tenants_;
  if (tenants_ != nullptr) tenants_->previous_ = &tenant;
  tenants_ = &tenant;
  ++tenant_count_;
}

void Pages::leave(Tenant& tenant) {
  const std::lock_guard guard(mutex_);
  if (tenant.next_ != nullptr) tenant.next_->previous_ = tenant.previous_;
  (tenant.previous_ != nullptr ? tenant.previous_->next_ : tenants_) = tenant.next_;
  --tenant_count_;
  trim_to_tenants();
}

void Pages::trim() {
  const std::lock_guard guard(mutex_);
  trim_to_tenants();
}

bool Pages::give_back_kept() {
  const std::lock_guard guard(mutex_);
  const std::size_t waiting = usage_.waiting;
  kept_ = 0;
  trim_to_tenants();
  const bool any = usage_.waiting < waiting;
  return (!may_keep_ && unmap_unused(/*waiting_too=*/true)) || any;
}

bool Pages::any_lives() const {
  for (const Tenant* t = tenants_; t != nullptr; t = t->next_) {
    if (t->lives()) return true;
  }
  return false;
}

std::size_t Pages::left_by_tenants() const {
  std::size_t sum = 0;
  for (const Tenant* t = tenants_; t != nullptr; t = t->next_) {
    if (!t->lives()) continue;
    const std::size_t left = t->unused();
    sum = left > SIZE_MAX - sum ? SIZE_MAX : sum + left;
  }
  return sum;
}

std::size_t Pages::handed_out_by_tenants() const {
  std::size_t sum = 0;
  for (const Tenant* t = tenants_; t != nullptr; t = t->next_) {
    if (t->lives()) sum += t->handed_out();
  }
  return sum;
}

// The tenants may still count `freed` bytes as used.
std::size_t Pages::excess(std::size_t freed) {
  if (usage_.waiting == 0) return 0;
  std::size_t most = kept_;
  if (any_lives()) {
    most = left_by_tenants();
    // Without a budget nobody has said how much may stay.
    const bool bounded = most < SIZE_MAX - freed;
    most = bounded ? most + freed : SIZE_MAX;
    kept_ = bounded && may_keep_ ? most + handed_out_by_tenants() : 0;
  }
  return usage_.waiting > most ? whole_pages(usage_.waiting - most) : 0;
}

void Pages::trim_to_tenants(std::size_t freed) {
  for (std::size_t left = excess(freed); left > 0;) {
    Span& span = longest_unused(left);
    left -= std::min(left, span.nbytes);
    give_back(span);
  }
  if (usage_.live == 0 && ranges_ != nullptr && !any_lives()) unmap_unused();
}

// Of what waits, no more than so many bytes if that can be.
Pages::Span& Pages::longest_unused(std::size_t nbytes) {
  if (longest_unused_->nbytes > nbytes && have_spare(1)) split(*longest_unused_, nbytes);
  return *longest_unused_;
}

void Pages::give_back(Span& span) {
  moves_.give_back(span.stretch());
  is_gone(span);
}

void Pages::is_gone(Span& span) {
  unfile_hole(first_of_hole(span));
  end_wait(span);
  span.state = Span::kGone;
  file_hole(first_of_hole(merged(span)));
}

// Pages that have to go move to where a block of `range` lacks them.
void Pages::move_to(Gone& gone, Range& range) {
  if (!may_keep_ || range.origins.inherited || gone.count == 0 || !moves_.may_move()) return;
  std::size_t left = excess(0);
  for (std::size_t i = 0; i < gone.count; ++i) {
    Gone::Part& part = gone.parts[i];
    while (std::min(left, part.nbytes) >= PageMoves::kLeastPages * kPage) {
      Span& span = longest_unused(std::min(left, part.nbytes));
      if (span.nbytes > part.nbytes) return;  // it could not be split
      const std::size_t nbytes = span.nbytes;
      left -= std::min(left, nbytes);
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

// ---- blocks -----------------------------------------------------------------------------------

void* Pages::allocate(const Label& label, bool populated) {
  Gone gone;
  char* block = allocate(label, populated, gone);
  for (std::size_t i = 0; populated && i < gone.count; ++i) {
    if (gone.parts[i].nbytes > 0) populate_pages(gone.parts[i].begin, gone.parts[i].nbytes);
  }
  return block;
}

char* Pages::allocate(const Label& label, bool populated, Gone& gone) {
  if (tenant_count_.load(std::memory_order_relaxed) == 0) return nullptr;
  if (label.nbytes > kMostRange) return nullptr;
  const std::size_t nbytes = whole_pages(label.nbytes);
  const std::lock_guard guard(mutex_);
  if (!any_lives() || !have_spare(3)) return nullptr;
  Place place = find(nbytes);
  if (place.hole == nullptr) {
    if (!reserve(nbytes)) return nullptr;
    place = find(nbytes);
  }
  Span& span = take(place, nbytes, gone);
  span.label = label;
  span.range->blocks[(span.begin - span.range->begin) / kPage] = &span;
  if (populated) move_to(gone, *span.range);
  trim_to_tenants();
  return span.begin;
}

std::optional<Pages::Label> Pages::disown(void* block) {
  if (!may_be_ours(block)) return {};
  const std::lock_guard guard(mutex_);
  Range* range = range_of(block);
  if (range == nullptr) return {};
  Span* span = range->blocks[(static_cast<char*>(block) - range->begin) / kPage];
  return std::exchange(span->label, {span->label.nbytes, nullptr});
}

std::optional<Pages::Label> Pages::free(void* block) {
  if (!may_be_ours(block)) return {};
  const std::lock_guard guard(mutex_);
  Range* range = range_of(block);
  if (range == nullptr) return {};
  Span*& entry = range->blocks[(static_cast<char*>(block) - range->begin) / kPage];
  Span* span = std::exchange(entry, nullptr);
  const Label label = span->label;
  const std::size_t freed = span->nbytes;
  usage_.live -= freed;
  if (span->before != nullptr && span->before->is_free()) unfile_hole(first_of_hole(*span->before));
  if (span->after != nullptr && span->after->is_free()) unfile_hole(*span->after);
  span->state = Span::kWaiting;
  Span& whole = merged(*span);
  let_wait(whole, latest_used_);
  file_hole(first_of_hole(whole));
  trim_to_tenants(freed);
  return label;
}

Pages::Place Pages::find(std::size_t nbytes) const {
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
    if (place.hole == nullptr) place = {&hole, hole.begin};
    return ++tried >= kTried;
  });
  return place;
}

// Bytes of [begin, begin + nbytes), which lies in `hole`, that are resident.
std::size_t Pages::covered(const Span& hole, const char* begin, std::size_t nbytes) {
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
Pages::Place Pages::best_in(Span& hole, std::size_t nbytes, std::size_t& most) {
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

Pages::Span& Pages::take(const Place& place, std::size_t nbytes, Gone& gone) {
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
  if (span->before != nullptr && span->before->is_free()) file_hole(first_of_hole(*span->before));
  if (span->after != nullptr && span->after->is_free()) file_hole(*span->after);
  return *span;
}

// ---- spans ------------------------------------------------------------------------------------

bool Pages::have_spare(int count) {
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

Stretch Pages::Range::stretch(char* from, std::size_t count) {
  return {from, count, &origins, static_cast<std::size_t>(from - begin) / kPage};
}

Stretch Pages::Span::stretch() const { return range->stretch(begin, nbytes); }

// Cuts `span` after `nbytes`; returns the rest.
Pages::Span& Pages::split(Span& span, std::size_t nbytes) {
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

void Pages::absorb_next(Span& span) {
  Span& next = *span.after;
  span.nbytes += next.nbytes;
  span.after = next.after;
  if (next.after != nullptr) next.after->before = &span;
  next.after = std::exchange(spare_, &next);
}

// `span`, which is free and does not wait yet, with its neighbours of the same state.
Pages::Span& Pages::merged(Span& span) {
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
void Pages::let_wait(Span& span, Span* older) {
  span.by_use = {older, older == nullptr ? longest_unused_ : older->by_use.next};
  (older == nullptr ? longest_unused_ : older->by_use.next) = &span;
  (span.by_use.next == nullptr ? latest_used_ : span.by_use.next->by_use.previous) = &span;
  waiting_.put(span);
  usage_.waiting += span.nbytes;
}

void Pages::end_wait(Span& span) {
  const auto [older, newer] = span.by_use;
  (older == nullptr ? longest_unused_ : older->by_use.next) = newer;
  (newer == nullptr ? latest_used_ : newer->by_use.previous) = older;
  waiting_.remove(span);
  usage_.waiting -= span.nbytes;
}

Pages::Span& Pages::first_of_hole(Span& span) {
  Span* first = &span;
  while (first->before != nullptr && first->before->is_free()) first = first->before;
  return *first;
}

void Pages::file_hole(Span& first) {
  first.hole = 0;
  for (const Span* s = &first; s != nullptr && s->is_free(); s = s->after) first.hole += s->nbytes;
  holes_.put(first);
}

void Pages::unfile_hole(Span& first) { holes_.remove(first); }

// ---- addresses --------------------------------------------------------------------------------

bool Pages::reserve(std::size_t nbytes) {
  may_keep_ = !addresses_are_dear();
  if (!may_keep_) {
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

bool Pages::map(std::size_t nbytes) {
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
  ranges_ = new (memory) Range{begin, nbytes, blocks, span, ranges_, origins};
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
void Pages::unmap(Range& range) {
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

bool Pages::unmap_unused(bool waiting_too) {
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
  return any;
}

Pages::Range* Pages::range_of(const void* block) const {
  const auto* address = static_cast<const char*>(block);
  Range* range = ranges_;
  while (range != nullptr &&
         (address < range->begin || address >= range->begin + range->nbytes)) {
    range = range->next;
  }
  return range;
}

Pages::~Pages() {
  give_back_kept();
  while (ranges_ != nullptr) unmap(*ranges_);
}

// ---- what holds -------------------------------------------------------------------------------

Pages::Usage Pages::usage() {
  const std::lock_guard guard(mutex_);
  Usage usage = usage_;
  usage.cuts = moves_.cuts();
  return usage;
}

void Pages::unlock_in_child() {
  for (Range* range = ranges_; range != nullptr; range = range->next) range->origins.inherited = true;
  mutex_.unlock();
}

void Pages::check() {
  const std::lock_guard guard(mutex_);
  Usage sum;
  for (const Range* range = ranges_; range != nullptr; range = range->next) {
    const char* at = range->begin;
    for (const Span* s = range->first; s != nullptr; s = s->after) {
      require(s->begin == at && s->range == range, "P1: spans lie side by side");
      require(s->before == nullptr ? s == range->first : s->before->after == s, "P1: are linked");
      if (s->before != nullptr && s->is_free()) {
        require(s->before->state != s->state, "P1: alike neighbours are one span");
      }
      require((range->blocks[(at - range->begin) / kPage] == s) == !s->is_free(),
              "P1: a block is found by its address");
      if (s->is_free() && (s->before == nullptr || !s->before->is_free())) {
        std::size_t hole = 0;
        for (const Span* t = s; t != nullptr && t->is_free(); t = t->after) hole += t->nbytes;
        require(s->hole == hole, "P2: a hole is filed under its bytes");
        bool filed = false;
        holes_.visit_from(hole, [&](Span& t, std::size_t) { return filed = &t == s; });
        require(filed, "P2: a hole is filed");
      }
      if (s->state == Span::kLive) sum.live += s->nbytes;
      if (s->state == Span::kWaiting) sum.waiting += s->nbytes;
      at = s->end();
    }
    require(at == range->begin + range->nbytes, "P1: spans fill their range");
    sum.reserved += range->nbytes;
  }
  std::size_t waiting = 0;
  const Span* older = nullptr;
  for (const Span* s = longest_unused_; s != nullptr; older = s, s = s->by_use.next) {
    require(s->by_use.previous == older && s->state == Span::kWaiting, "P3: what waits is linked");
    waiting += s->nbytes;
  }
  require(latest_used_ == older && waiting == sum.waiting, "P3: all that waits is linked");
  require(sum.live == usage_.live && sum.waiting == usage_.waiting, "P3: what waits is counted");
  require(sum.reserved == usage_.reserved, "P1: ranges are counted");
}

}  // namespace rematfn
