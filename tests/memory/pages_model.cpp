// SPDX-License-Identifier: Apache-2.0
//
// The pool of pages beside a naive one, without torch: blocks of random sizes come and go while budgets
// change.
#include "memory/pages.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "model.h"

using rematfn::expect, rematfn::Pages;

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kMiB = std::size_t{1} << 20;

struct Budget final : rematfn::Tenant {
  explicit Budget(std::size_t nbytes) : left(nbytes) {}
  bool lives() const override { return alive; }
  std::size_t unused() const override { return left; }
  std::size_t handed_out() const override { return results; }
  std::atomic<bool> alive{true};
  std::atomic<std::size_t> left;
  std::atomic<std::size_t> results{0};
};

struct Block {
  char* begin;
  std::size_t nbytes;
  unsigned char filling;
};

std::size_t whole(std::size_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }

// What the process has: addresses, resident pages that are anonymous, and data.
struct Process {
  std::size_t addresses, resident, data;
};

Process process() {
  std::ifstream file("/proc/self/statm");
  std::size_t all = 0, resident = 0, shared = 0, text = 0, library = 0, data = 0;
  expect(bool(file >> all >> resident >> shared >> text >> library >> data), "statm");
  return {all * kPage, (resident - shared) * kPage, data * kPage};
}

Block allocate(Pages& pages, std::size_t nbytes, unsigned char filling) {
  const Pages::Label label{nbytes, reinterpret_cast<void*>(nbytes ^ 1)};
  auto* begin = static_cast<char*>(pages.allocate(label));
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

// What waits, one page at a time: when it was freed.
struct Naive {
  std::map<char*, int> pages;
  int now = 0;

  [[nodiscard]] char* end_of(char* begin) const {
    while (pages.contains(begin)) begin += kPage;
    return begin;
  }
  // The smallest stretch that holds so many bytes, the lowest of those; null if there is none.
  [[nodiscard]] char* best(std::size_t nbytes) const {
    char* best = nullptr;
    std::size_t smallest = SIZE_MAX;
    for (auto at = pages.begin(); at != pages.end();) {
      char* const begin = at->first;
      char* const end = end_of(begin);
      const auto size = static_cast<std::size_t>(end - begin);
      if (size >= nbytes && size < smallest) best = begin, smallest = size;
      at = pages.lower_bound(end);
    }
    return best;
  }
  void take(char* begin, std::size_t nbytes) {
    for (char* page = begin; page < begin + nbytes; page += kPage) pages.erase(page);
  }
  void add(char* begin, std::size_t nbytes) {
    ++now;
    for (char* page = begin; page < begin + nbytes; page += kPage) pages[page] = now;
    while (pages.contains(begin - kPage)) begin -= kPage;
    for (char* end = end_of(begin); begin < end; begin += kPage) pages[begin] = now;
  }
  void trim(std::size_t nbytes) {
    while (pages.size() * kPage > nbytes) {
      pages.erase(std::min_element(pages.begin(), pages.end(),
                                   [](const auto& a, const auto& b) { return a.second < b.second; }));
    }
  }
};

void random_blocks(unsigned seed) {
  std::mt19937 random(seed);
  Pages pages;
  Naive naive;
  Budget budget(0);
  pages.enter(budget);
  std::vector<Block> blocks;
  std::size_t live = 0;
  const Process before = process();
  for (int step = 0; step < 1000; ++step) {
    const unsigned what = random() % 100;
    std::size_t freed = 0;
    if (what < 50 || blocks.empty()) {
      const std::size_t most = random() % 16 == 0 ? kMiB : random() % 4 == 0 ? 80 * kPage : 20 * kPage;
      const std::size_t nbytes = 1 + random() % most;
      // As a level does: what a block takes is no longer left.
      if (random() % 4 != 0) budget.left -= std::min(budget.left.load(), whole(nbytes));
      char* const expected = naive.best(whole(nbytes));
      const Block block = allocate(pages, nbytes, static_cast<unsigned char>(random()));
      expect(block.begin != nullptr, "there is room");
      expect(expected == nullptr || block.begin == expected, "the smallest stretch that holds it");
      naive.take(block.begin, whole(nbytes));  // all, or what has grown, or nothing
      for (const Block& other : blocks) {
        expect(block.begin + whole(block.nbytes) <= other.begin ||
                   other.begin + whole(other.nbytes) <= block.begin,
               "blocks do not overlap");
      }
      blocks.push_back(block);
      live += whole(nbytes);
    } else if (what < 95) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      const Block block = blocks.back();
      release(pages, block);
      blocks.pop_back();
      freed = whole(block.nbytes);
      naive.add(block.begin, freed);
      live -= freed;
    } else {
      budget.left = random() % 3 == 0 ? 0 : random() % (4 * kMiB);
      pages.trim();
    }
    naive.trim(budget.left + freed);
    const std::size_t waiting = pages.waiting();
    expect(waiting == naive.pages.size() * kPage, "what waits is what may");
    if (step % 50 != 0) continue;
    const Process now = process();
    const std::size_t counted = live + waiting;
    expect(now.resident < before.resident + counted + kMiB, "what is resident is counted");
    expect(now.resident + kMiB > before.resident + counted, "what is counted is resident");
    expect(now.addresses < before.addresses + counted + kMiB, "so is what is mapped");
  }
  for (const Block& block : blocks) release(pages, block);
  pages.trim();  // now the tenant has heard of all
  budget.alive = false;
  pages.trim();
  expect(pages.waiting() <= budget.left, "no more is kept than the budget leaves");
  pages.give_back_kept();
  expect(pages.waiting() == 0, "all goes back");
  expect(process().addresses < before.addresses + kMiB, "addresses too");
  pages.leave(budget);
}

void kept_between_tenants() {
  Pages pages;
  Budget budget(3 * kMiB);
  pages.enter(budget);
  const Block result = allocate(pages, kMiB, 1);
  std::vector<Block> blocks;
  for (unsigned char i = 0; i < 4; ++i) blocks.push_back(allocate(pages, kMiB, i));
  budget.results = kMiB;
  for (const Block& block : blocks) release(pages, block);
  pages.trim();
  expect(pages.waiting() == 3 * kMiB, "what the budget leaves");
  budget.alive = false;
  pages.trim();
  expect(pages.keeps() && pages.waiting() == 3 * kMiB, "nobody lives, and it is kept");
  release(pages, result);
  expect(pages.waiting() == 4 * kMiB, "and what the results took");
  expect(pages.allocate({kMiB, nullptr}) == nullptr, "nobody gets any of it");
  budget.results = 0;
  budget.alive = true;
  pages.trim();
  expect(pages.waiting() == 3 * kMiB, "until one comes that hands out less");
  budget.left = SIZE_MAX;
  pages.trim();
  budget.alive = false;
  pages.trim();
  expect(!pages.keeps() && pages.waiting() == 0, "one without a budget leaves none");
  pages.leave(budget);
  int outside = 0;
  expect(!pages.free(&outside) && !pages.disown(&outside), "what is not ours is left alone");
}

void threads() {
  Pages pages;
  Budget budget(8 * kMiB);
  pages.enter(budget);
  std::mutex mutex;
  std::vector<Block> shared;  // freed by whoever comes
  const auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    for (int step = 0; step < 1000; ++step) {
      const Block block =
          allocate(pages, 1 + random() % (40 * kPage), static_cast<unsigned char>(seed + step));
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
  for (const Block& block : shared) release(pages, block);
  pages.leave(budget);
}

// A limit on addresses or on data, of which so many bytes are used.
void few_addresses(int which, std::size_t used) {
  Pages pages;
  Budget budget(SIZE_MAX);
  pages.enter(budget);
  rlimit limit{};
  getrlimit(which, &limit);
  const rlimit less{used + 400 * kMiB, limit.rlim_max};
  expect(setrlimit(which, &less) == 0, "setrlimit");
  std::vector<Block> blocks;
  const auto fill = [&](std::size_t nbytes) {
    for (;;) {
      blocks.push_back({static_cast<char*>(pages.allocate({nbytes, nullptr})), nbytes, 0});
      if (blocks.back().begin == nullptr) break;
    }
    blocks.pop_back();
    return blocks.size() * nbytes;
  };
  const auto free_all = [&] {
    for (const Block& block : blocks) pages.free(block.begin);
    blocks.clear();
  };
  const auto others_take = [](std::size_t nbytes) {
    void* all = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all != MAP_FAILED) munmap(all, nbytes);
    return all != MAP_FAILED;
  };
  expect(fill(10 * kMiB) >= 380 * kMiB, "what there is can be had");
  free_all();
  expect(pages.waiting() >= 380 * kMiB, "the budget has room for all of it");
  expect(fill(100 * kMiB) >= 300 * kMiB, "by larger blocks, too");
  free_all();
  expect(!others_take(350 * kMiB), "what waits has its addresses");
  expect(pages.give_back() && others_take(350 * kMiB), "until others need them");
  budget.left = 400 * kMiB;
  fill(10 * kMiB);
  free_all();
  expect(pages.waiting() >= 380 * kMiB, "there is room in a budget");
  budget.alive = false;
  pages.trim();
  expect(others_take(350 * kMiB), "but between calls nothing is kept from others");
  pages.leave(budget);
  setrlimit(which, &limit);
}

// A process may have no more mappings: of many pages every other one can be read only.
void few_mappings() {
  Pages pages;
  Budget budget(64 * kMiB);
  pages.enter(budget);
  std::vector<Block> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(allocate(pages, kMiB, 1));
  std::size_t most = 0;
  std::ifstream("/proc/sys/vm/max_map_count") >> most;
  const std::size_t nbytes = 2 * most * kPage;
  auto* const many = static_cast<char*>(
      mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  for (std::size_t at = 0; at < nbytes && mprotect(many + at, kPage, PROT_READ) == 0;) at += 2 * kPage;
  const std::size_t before = process().resident;
  for (const int i : {1, 3, 5}) release(pages, blocks[i]);
  expect(pages.give_back() && pages.waiting() == 0, "what waits goes back");
  expect(process().resident < before - 2 * kMiB, "its pages at least");
  const Block block = allocate(pages, 2 * kMiB, 2);
  munmap(many, nbytes);
  if (block.begin != nullptr) release(pages, block);
  for (const int i : {0, 2, 4, 6, 7}) release(pages, blocks[i]);
  pages.leave(budget);
}

const rematfn::Tests kTests{
    {"random", [] { for (unsigned seed = 0; seed < 4; ++seed) random_blocks(seed); }},
    {"kept", kept_between_tenants},
    {"threads", threads},
    {"addresses", [] { few_addresses(RLIMIT_AS, process().addresses); }},
    {"data", [] { few_addresses(RLIMIT_DATA, process().data); }},
    {"mappings", few_mappings},
};

}  // namespace

int main(int count, char** arguments) { rematfn::run_named(kTests, count - 1, arguments + 1); }
