// SPDX-License-Identifier: Apache-2.0
//
// The pool of pages against a model, without torch: blocks of random sizes come and go while budgets
// change. Prints what went wrong, if anything did.
#include "memory/pages.h"
#include "memory/system_pages.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

using rematfn::Pages;

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kMiB = std::size_t{1} << 20;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::printf("failed: %s\n", what);
  std::exit(1);
}

struct Budget final : rematfn::Tenant {
  explicit Budget(std::size_t nbytes) : left(nbytes) {}
  bool lives() const override { return alive; }
  std::size_t unused() const override { return left; }
  std::atomic<bool> alive{true};
  std::atomic<std::size_t> left;
};

struct Block {
  [[nodiscard]] char* end() const { return begin + nbytes; }
  char* begin;
  std::size_t nbytes;
  unsigned char filling;
};

std::size_t whole(std::size_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }

std::size_t resident_pages(const char* begin, std::size_t nbytes) {
  std::vector<unsigned char> pages(whole(nbytes) / kPage);
  expect(mincore(const_cast<char*>(begin), nbytes, pages.data()) == 0, "mincore");
  return static_cast<std::size_t>(
      std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return page & 1; }));
}

// Bytes of this process that are resident and anonymous.
std::size_t resident_bytes() {
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  std::size_t all = 0, resident = 0, shared = 0;
  expect(std::fscanf(file, "%zu %zu %zu", &all, &resident, &shared) == 3, "statm");
  std::fclose(file);
  return (resident - shared) * kPage;
}

std::size_t mappings() {
  std::ifstream file("/proc/self/maps");
  std::size_t lines = 0;
  for (std::string line; std::getline(file, line);) ++lines;
  return lines;
}

Block allocate(Pages& pages, std::size_t nbytes, unsigned char filling, bool populated = false) {
  const Pages::Label label{nbytes, reinterpret_cast<void*>(nbytes ^ 1)};
  auto* begin = static_cast<char*>(pages.allocate(label, populated));
  if (begin == nullptr) return {nullptr, 0, 0};
  expect(reinterpret_cast<std::uintptr_t>(begin) % kPage == 0, "a block begins with a page");
  std::memset(begin, filling, nbytes);
  return {begin, nbytes, filling};
}

void release(Pages& pages, const Block& block) {
  for (std::size_t i = 0; i < block.nbytes; ++i) {
    expect(static_cast<unsigned char>(block.begin[i]) == block.filling, "a block keeps its bytes");
  }
  const auto label = pages.free(block.begin);
  expect(label && label->nbytes == block.nbytes, "a block keeps its size");
  expect(label->owner == reinterpret_cast<void*>(block.nbytes ^ 1), "a block keeps its owner");
}

void random_blocks(unsigned seed) {
  std::mt19937 random(seed);
  Pages pages;
  Budget budget(0);
  pages.enter(budget);
  std::vector<Block> blocks;
  std::size_t live = 0;
  std::size_t freed = 0;  // by the last step
  const std::size_t before = resident_bytes();
  const std::size_t mapped_before = mappings();
  for (int step = 0; step < 3000; ++step) {
    const unsigned what = random() % 100;
    freed = 0;
    if (what < 50 || blocks.empty()) {
      const std::size_t most = random() % 16 == 0 ? 6 * kMiB : random() % 4 == 0 ? 300 * kPage : 20 * kPage;
      const std::size_t nbytes = 1 + random() % most;
      const auto filling = static_cast<unsigned char>(random());
      // As a level does: what a block takes is no longer left.
      if (random() % 4 != 0) budget.left -= std::min(budget.left.load(), whole(nbytes));
      const Block block = allocate(pages, nbytes, filling, random() % 4 != 0);
      expect(block.begin != nullptr, "there is room");
      for (const Block& other : blocks) {
        expect(block.begin + whole(block.nbytes) <= other.begin ||
                   other.begin + whole(other.nbytes) <= block.begin,
               "blocks do not overlap");
      }
      blocks.push_back(block);
      live += whole(nbytes);
    } else if (what < 95) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      release(pages, blocks.back());
      freed = whole(blocks.back().nbytes);
      live -= freed;
      blocks.pop_back();
    } else {
      budget.left = random() % 3 == 0 ? 0 : random() % (16 * kMiB);
      pages.trim();
    }
    const Pages::Usage usage = pages.usage();
    expect(usage.live == live, "what is live is counted");
    expect(usage.waiting <= budget.left + freed, "no more waits than the budget leaves");
    if (step % 50 == 0) {
      pages.check();
      const std::size_t added = resident_bytes() - before;
      const std::size_t counted = usage.live + usage.waiting;
      expect(added < counted + 2 * kMiB, "what is resident is counted");
      expect(added + 2 * kMiB > counted, "what is counted is resident");
      expect(mappings() <= mapped_before + 8 + usage.cuts, "what is cut is counted");
    }
  }
  if (rematfn::PageMoves().may_move()) expect(pages.usage().moved > 0, "pages move");
  for (const Block& block : blocks) release(pages, block);
  pages.check();
  pages.trim();  // now the tenant has heard of all
  budget.alive = false;
  pages.trim();
  pages.check();
  expect(pages.usage().live == 0, "nothing is live");
  expect(pages.usage().waiting <= budget.left, "no more is kept than the budget leaves");
  pages.give_back_kept();
  pages.check();
  expect(pages.usage().waiting == 0, "all goes back");
  expect(pages.usage().reserved == 0, "addresses go back");
  expect(pages.usage().cuts == 0, "and with them what was cut");
  pages.leave(budget);
}

std::size_t faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::size_t>(usage.ru_minflt);
}

// The first of a pool.
std::vector<Block> side_by_side(Pages& pages, int count) {
  std::vector<Block> blocks;
  for (int i = 0; i < count; ++i) {
    blocks.push_back(allocate(pages, kMiB, 1));
    expect(blocks[i].begin == blocks[0].begin + i * kMiB, "blocks lie side by side");
  }
  return blocks;
}

void the_longest_unused_goes_first() {
  Pages pages;
  Budget budget(64 * kMiB);
  pages.enter(budget);
  const std::vector<Block> blocks = side_by_side(pages, 6);
  for (const int i : {2, 0, 4}) release(pages, blocks[i]);
  const auto left = [&](int i) { return resident_pages(blocks[i].begin, kMiB); };
  budget.left = 2 * kMiB;
  pages.trim();
  expect(left(2) == 0 && left(0) == 256 && left(4) == 256, "that was freed first");
  budget.left = kMiB + kMiB / 2;
  pages.trim();
  expect(left(0) == 128 && left(4) == 256, "no more than has to");
  const Block again = allocate(pages, kMiB, 7);
  expect(again.begin == blocks[4].begin, "the resident one is taken");
  release(pages, again);
  pages.trim();
  budget.alive = false;
  pages.trim();
  expect(pages.keeps() && left(4) == 256, "when nobody lives, as much as was left is kept");
  release(pages, blocks[3]);
  expect(left(3) + left(4) == 384 && pages.usage().waiting == kMiB + kMiB / 2,
         "no more than that");
  pages.give_back_kept();
  expect(!pages.keeps() && pages.usage().waiting == 0, "until it is asked for");
  expect(left(1) == 256 && left(5) == 256, "but what is in use");
  expect(pages.allocate({kMiB, nullptr}) == nullptr, "nor does anybody get more");
  pages.check();
  for (const int i : {1, 5}) release(pages, blocks[i]);
  pages.leave(budget);
  expect(pages.usage().reserved == 0, "addresses go back in the end");
  int outside = 0;
  expect(!pages.free(&outside), "what is not ours is left alone");
}

void pages_move() {
  if (!rematfn::PageMoves().may_move()) return;
  Pages pages;
  Budget budget(4 * kMiB);
  pages.enter(budget);
  const std::vector<Block> blocks = side_by_side(pages, 8);
  char* const first = blocks[0].begin;
  for (const int i : {1, 3, 5}) release(pages, blocks[i]);
  budget.left = kMiB / 2;  // a block of 2.5 MiB comes, and takes what was left
  const std::size_t before = faults();
  const Block block = allocate(pages, 2 * kMiB + kMiB / 2, 9, /*populated=*/true);
  expect(faults() < before + 32, "none of its pages is cleared");
  expect(pages.usage().moved == 2 * kMiB + kMiB / 2, "all of them have moved");
  expect(pages.usage().waiting == kMiB / 2, "what may stay stays");
  expect(resident_pages(first + kMiB, kMiB) == 0, "where the oldest were, none are left");
  expect(resident_pages(first + 3 * kMiB, kMiB) == 0, "nor there");
  expect(resident_pages(first + 5 * kMiB, kMiB) == 128, "but what did not have to go");
  expect(pages.usage().cuts > 0, "mappings are cut");
  pages.check();
  release(pages, block);
  budget.left = 0;
  pages.trim();
  expect(resident_pages(block.begin, block.nbytes) == 0, "what has moved goes back like others");
  expect(pages.usage().cuts == 0, "and makes one mapping with its neighbours");
  for (const int i : {0, 2, 4, 6, 7}) release(pages, blocks[i]);
  pages.check();
  pages.leave(budget);
}

// Every other span of pages moves away from its neighbours, until that would be too many mappings.
void cuts_are_limited() {
  if (!rematfn::PageMoves().may_move()) return;
  Pages pages;
  Budget budget(SIZE_MAX);
  pages.enter(budget);
  constexpr std::size_t kBytes = 16 * kPage;
  constexpr int kCount = 3 * rematfn::PageMoves::kMostCuts / 2;
  const std::size_t before = mappings();
  std::vector<Block> far, near, moved;
  for (int i = 0; i < kCount; ++i) {
    far.push_back(allocate(pages, kBytes, 1));
    near.push_back(allocate(pages, kBytes, 2));
  }
  std::size_t most = 0;
  for (int i = 0; i < kCount; ++i) {
    release(pages, far[i]);
    budget.left = 0;
    moved.push_back(allocate(pages, 2 * kBytes, 3, /*populated=*/true));
    most = std::max(most, pages.usage().cuts);
    budget.left = SIZE_MAX;
  }
  expect(most > rematfn::PageMoves::kMostCuts / 2, "many are cut");
  expect(most <= rematfn::PageMoves::kMostCuts + 16, "but no more than that");
  expect(mappings() < before + most + 16, "as the system counts them");
  for (const Block& block : moved) release(pages, block);
  for (const Block& block : near) release(pages, block);
  budget.left = 0;
  pages.trim();
  pages.check();
  expect(pages.usage().cuts == 0 && mappings() < before + 16, "what goes back is whole again");
  pages.leave(budget);
}

// Blocks lie side by side, and every other one waits. Then `prevent` is called: what should move goes back.
void nothing_moves(const std::function<std::function<void()>()>& prevent) {
  if (!rematfn::PageMoves().may_move()) return;
  Pages pages;
  Budget budget(4 * kMiB);
  pages.enter(budget);
  const std::vector<Block> blocks = side_by_side(pages, 8);
  for (const int i : {1, 3, 5}) release(pages, blocks[i]);
  budget.left = kMiB / 2;
  const std::function<void()> allow = prevent();
  const Block block = allocate(pages, 2 * kMiB + kMiB / 2, 9, /*populated=*/true);
  allow();
  expect(block.begin != nullptr, "a block comes");
  expect(pages.usage().moved == 0, "to which nothing moves");
  expect(pages.usage().waiting == kMiB / 2, "what may stay stays, and the rest has gone");
  expect(resident_pages(blocks[1].begin, kMiB) == 0, "as the system counts it");
  pages.check();
  release(pages, block);
  for (const int i : {0, 2, 4, 6, 7}) release(pages, blocks[i]);
  pages.check();
  pages.leave(budget);
}

// The pool has reserved far more than that.
std::function<void()> limit_addresses() {
  rlimit before{};
  getrlimit(RLIMIT_AS, &before);
  const rlimit less{kMiB, before.rlim_max};
  expect(setrlimit(RLIMIT_AS, &less) == 0, "setrlimit");
  return [before] { setrlimit(RLIMIT_AS, &before); };
}

// A process may have no more mappings: of many pages every other one can be read only.
std::function<void()> use_up_mappings() {
  std::size_t most = 0;
  std::ifstream("/proc/sys/vm/max_map_count") >> most;
  const std::size_t nbytes = 2 * most * kPage;
  auto* const many = static_cast<char*>(rematfn::map_pages(nbytes));
  std::size_t at = 0;
  while (at < nbytes && mprotect(many + at, kPage, PROT_READ) == 0) at += 2 * kPage;
  expect(at < nbytes, "mappings are limited");
  return [=] { munmap(many, nbytes); };
}

// Of the mappings that lie in [begin, begin + nbytes): bytes in huge pages, and whether any is to have
// more of them.
struct Huge {
  std::size_t nbytes = 0;
  bool wanted = false;
};

Huge huge_in(const char* begin, std::size_t nbytes) {
  std::ifstream file("/proc/self/smaps");
  Huge found;
  bool inside = false;
  for (std::string line; std::getline(file, line);) {
    std::size_t from = 0, to = 0, kib = 0;
    if (std::sscanf(line.c_str(), "%zx-%zx ", &from, &to) == 2) {
      const auto first = reinterpret_cast<std::uintptr_t>(begin);
      inside = from < first + nbytes && to > first;
    } else if (inside && std::sscanf(line.c_str(), "AnonHugePages: %zu", &kib) == 1) {
      found.nbytes += kib << 10;
    } else if (inside && line.starts_with("VmFlags:")) {
      found.wanted |= line.find(" hg") != std::string::npos;
    }
  }
  return found;
}

// Whether the system has so many bytes of them now. It may have been told not to, or have none left.
bool are_huge_pages_to_be_had(std::size_t nbytes) {
  if (rematfn::huge_page() == 0) return false;
  const std::size_t mapped = nbytes + rematfn::huge_page();
  auto* memory = static_cast<char*>(rematfn::map_pages(mapped));
  madvise(memory, mapped, MADV_HUGEPAGE);
  std::memset(memory, 1, mapped);
  const bool had = huge_in(memory, mapped).nbytes >= nbytes;
  munmap(memory, mapped);
  return had;
}

void huge_pages() {
  const std::size_t huge = rematfn::huge_page();
  if (!are_huge_pages_to_be_had(20 * huge)) return;
  Pages pages;
  Budget budget(SIZE_MAX);
  pages.enter(budget);
  const std::size_t nbytes = 8 * huge + 3 * kPage;
  const Block small = allocate(pages, kMiB, 1, /*populated=*/true);
  const Block block = allocate(pages, nbytes, 2, /*populated=*/true);
  expect(reinterpret_cast<std::uintptr_t>(block.begin) % huge == 0, "a block begins with a huge page");
  expect(huge_in(block.begin, nbytes).nbytes == 8 * huge, "where all of one is wanted it is made");
  expect(resident_pages(block.begin + nbytes, huge) == 0, "and nothing beside the block");
  const auto between = static_cast<std::size_t>(block.begin - small.end());
  expect(between < huge && resident_pages(small.end(), between) == 0, "nor between blocks");
  const Block sparse = allocate(pages, 2 * huge, 3);
  expect(huge_in(block.begin, sparse.end() - block.begin).nbytes == 8 * huge,
         "what may not be used is not made huge");
  expect(!huge_in(small.begin, sparse.end() - small.begin).wanted, "nor later, by the system");
  release(pages, sparse);
  release(pages, block);
  const std::size_t before = resident_bytes() - pages.usage().waiting;
  budget.left = 5 * huge + 7 * kPage;
  pages.trim();
  const auto is_resident = [&](std::size_t expected) {
    const std::size_t added = resident_bytes() - before;
    return added < expected + huge / 4 && expected < added + huge / 4;
  };
  expect(is_resident(budget.left), "parts of them go back");
  budget.left = nbytes;
  const Block again = allocate(pages, nbytes, 4, /*populated=*/true);
  budget.left = 0;
  pages.trim();
  expect(is_resident(nbytes), "and come again, and no more than that");
  for (const Block& each : {small, again}) release(pages, each);
  pages.check();
  pages.leave(budget);
}

// A little goes back in each call, and comes again as small pages. Its level leaves the pool after it, or
// dies with its graph while the next one is there.
void huge_pages_wear_out(bool leaves) {
  const std::size_t huge = rematfn::huge_page();
  if (!are_huge_pages_to_be_had(20 * huge)) return;
  Pages pages;
  const std::size_t nbytes = 4 * huge;
  const std::size_t part = huge / 8;
  Budget budget(SIZE_MAX);
  pages.enter(budget);
  const Block result = allocate(pages, kMiB, 2);  // of another call; the range stays mapped for it
  pages.leave(budget);
  bool is_in = false;
  const auto call = [&] {
    if (!is_in) pages.enter(budget);
    is_in = !leaves;
    budget.alive = true;
    budget.left = nbytes;
    const Block block = allocate(pages, nbytes, 1, /*populated=*/true);
    const std::size_t found = huge_in(block.begin, nbytes).nbytes;
    release(pages, block);
    budget.left = nbytes - part;
    pages.trim();
    budget.alive = false;
    leaves ? pages.leave(budget) : pages.trim();
    pages.check();
    return found;
  };
  expect(call() == nbytes, "all of a block is made huge");
  std::size_t last = nbytes;
  int calls = 1;
  for (; pages.usage().waiting > 0; ++calls) {
    expect(pages.usage().waiting == nbytes - part, "pages are kept");
    expect(calls <= 512, "but not for ever");
    last = call();
  }
  expect(last < nbytes, "what comes again does not come as huge pages");
  expect(calls > 200, "and not before many have come");
  expect(call() == nbytes, "then they are made anew");
  expect(pages.usage().waiting == nbytes - part, "and kept");
  release(pages, result);
  pages.give_back_kept();
  if (is_in) pages.leave(budget);
}

void threads() {
  Pages pages;
  Budget budget(8 * kMiB);
  pages.enter(budget);
  std::mutex mutex;
  std::vector<Block> shared;  // freed by whoever comes
  const auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    for (int step = 0; step < 2000; ++step) {
      const Block block =
          allocate(pages, 1 + random() % (40 * kPage), static_cast<unsigned char>(seed + step),
                   /*populated=*/step % 2 == 0);
      expect(block.begin != nullptr, "there is room");
      Block other = block;
      {
        const std::lock_guard guard(mutex);
        shared.push_back(block);
        std::swap(shared[random() % shared.size()], shared.back());
        if (shared.size() < 40) continue;
        other = shared.back();
        shared.pop_back();
      }
      release(pages, other);
      if (step % 100 == 0) budget.left = random() % (16 * kMiB);
    }
  };
  std::vector<std::thread> all;
  for (unsigned seed = 0; seed < 4; ++seed) all.emplace_back(work, seed);
  for (std::thread& thread : all) thread.join();
  pages.check();
  for (const Block& block : shared) release(pages, block);
  pages.leave(budget);
}

void a_fork() {
  Pages pages;
  Budget budget(8 * kMiB);
  pages.enter(budget);
  const Block before = allocate(pages, kMiB, 1);
  pages.lock();
  const pid_t child = fork();
  child == 0 ? pages.unlock_in_child() : pages.unlock();
  if (child == 0) {
    const Block own = allocate(pages, 2 * kMiB, 2);
    release(pages, before);
    release(pages, own);
    pages.check();
    budget.left = 0;
    const Block other = allocate(pages, 3 * kMiB, 3, /*populated=*/true);
    release(pages, other);
    expect(pages.usage().moved == 0, "mappings that are inherited stay whole");
    std::_Exit(0);
  }
  int status = 1;
  waitpid(child, &status, 0);
  expect(status == 0, "the child allocates and frees");
  release(pages, before);
  pages.leave(budget);
}

// A limit on addresses: ranges are small, and what they do not need is there for others. What counts in
// it is the number in this place of `statm`.
void few_addresses(int which, int place) {
  Pages pages;
  Budget budget(SIZE_MAX);
  pages.enter(budget);
  rlimit limit{};
  getrlimit(which, &limit);
  std::size_t used = 0;
  std::ifstream file("/proc/self/statm");
  for (int i = 0; i < place; ++i) file >> used;
  const rlimit less{used * kPage + 400 * kMiB, limit.rlim_max};
  expect(setrlimit(which, &less) == 0, "setrlimit");
  std::vector<Block> blocks;
  for (;;) {
    const Block block = allocate(pages, 10 * kMiB, 1);
    if (block.begin == nullptr) break;
    blocks.push_back(block);
  }
  expect(blocks.size() >= 30, "most of what there is can be had");
  expect(pages.allocate({900 * kMiB, nullptr}) == nullptr, "what there is not, cannot");
  pages.check();
  const auto release_all = [&] {
    for (const Block& block : blocks) release(pages, block);
    blocks.clear();
  };
  release_all();
  expect(pages.usage().waiting >= 300 * kMiB, "the budget has room for all of it");
  for (int i = 0; i < 3; ++i) {
    blocks.push_back(allocate(pages, 100 * kMiB, 2));
    expect(blocks.back().begin != nullptr, "what was freed can be had again, by larger blocks");
  }
  pages.check();
  release_all();
  const auto others_take = [](std::size_t nbytes) {
    void* all = rematfn::map_pages(nbytes);
    if (all != nullptr) munmap(all, nbytes);
    return all != nullptr;
  };
  expect(!others_take(350 * kMiB), "what waits has its addresses");
  expect(pages.give_back_kept() && others_take(350 * kMiB), "until others need them");
  pages.check();
  for (int i = 0; i < 9; ++i) {
    blocks.push_back(allocate(pages, 40 * kMiB, 2));
    expect(blocks.back().begin != nullptr, "and large blocks take no more than they need");
  }
  expect(pages.usage().reserved == 360 * kMiB, "of addresses either");
  release_all();
  budget.alive = false;
  pages.trim();
  pages.check();
  expect(others_take(350 * kMiB), "addresses go back");
  pages.leave(budget);
  setrlimit(which, &limit);
}

const std::map<std::string, std::function<void()>> kTests{
    {"random", [] { for (unsigned seed = 0; seed < 6; ++seed) random_blocks(seed); }},
    {"oldest", the_longest_unused_goes_first},
    {"moves", pages_move},
    {"cuts", cuts_are_limited},
    {"limited", [] { nothing_moves(limit_addresses); }},
    {"mappings", [] { nothing_moves(use_up_mappings); }},
    {"huge", huge_pages},
    {"worn", [] { huge_pages_wear_out(/*leaves=*/true); }},
    {"worn_while_others_are_there", [] { huge_pages_wear_out(/*leaves=*/false); }},
    {"threads", threads},
    {"fork", a_fork},
    {"addresses", [] { few_addresses(RLIMIT_AS, 1); }},
    {"data", [] { few_addresses(RLIMIT_DATA, 6); }},
};

}  // namespace

int main(int count, char** arguments) {
  for (int i = 1; i < count; ++i) kTests.at(arguments[i])();
}
