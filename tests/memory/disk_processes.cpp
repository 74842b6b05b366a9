// SPDX-License-Identifier: Apache-2.0
//
// What is left behind: by a disk, in a forked child, at exit.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "disk_model.h"
#include "memory/slab.h"

namespace rematfn {
namespace {

void nothing_is_left() {
  std::thread([] {}).join();  // a sanitizer's own has started
  const std::size_t before = entries(folder.c_str());
  const std::size_t ran = threads();
  const std::size_t opened = open_files();
  {
    auto disk = std::make_unique<TestDisk>(options());
    expect(threads() == ran && open_files() == opened, "nothing is opened before it is needed");
    Value value(4 * kMiB, 1);
    const Value second(4 * kMiB, 2);
    const Copy copy = moved(*disk, value);
    const Copy other = write(*disk, second);
    expect(threads() == ran + 2 && open_files() == opened + 1, "two threads and a file");
    expect(entries(folder.c_str()) == before, "which has no name");
    disk.reset();
    expect(returns(value, *copy), "a copy outlives the disk");
  }
  for (int i = 0; i < 500 && threads() > ran; ++i) std::this_thread::sleep_for(milliseconds(2));
  expect(threads() == ran && open_files() == opened, "all goes with the last of them");
}

#ifndef __SANITIZE_THREAD__  // which does not go on in a child that starts threads

void a_fork() {
  for (int round = 0; round < 20; ++round) {
    auto disk = std::make_unique<TestDisk>(options());
    Value value(2 * kMiB, 1);
    Value second(2 * kMiB, 2);
    Copy away = moved(*disk, value);
    std::atomic<int> inside{0};
    on_read = on_write = [&](int, std::size_t, off_t) -> Answer {
      ++inside;
      std::this_thread::sleep_for(milliseconds(1));
      --inside;
      return {};
    };
    value.clear();
    away->read(value.begin);
    Copy leaving = write(*disk, second);
    std::this_thread::sleep_for(milliseconds(round % 5));
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      expect(inside == 0, "no transfer runs across a fork");
      expect(away->is_done() && leaving->is_done(), "nothing is waited for in the child");
      for (Copy* copy : {&away, &leaving}) {
        const std::string said = error_of([&] { (*copy)->wait(); });
        expect(has(said, "before a fork"), "what was moved before is lost: " + said);
        expect(!error_of([&] { (*copy)->read(value.begin); }).empty(), "and cannot be read");
      }
      leaving.reset();
      expect(disk->figures().held == 0 && disk->has_room(64 * kMiB), "the child has its own");
      Copy own = moved(*disk, second);
      expect(returns(second, *own), "and writes to a file of its own");
      if (round % 2 == 0) own.reset(), away.reset(), disk.reset();
      std::exit(0);
    }
    // A page that is written to now is not the child's any more.
    for (std::size_t i = 0; i < second.nbytes; i += kPage) second.begin[i] = second.at(i);
    away->wait();
    expect(value.is_whole(), "the parent's come to the parent");
    leaving->wait();
    expect(returns(second, *leaving), "and all go on there");
    int status = 0;
    expect(waitpid(child, &status, 0) == child && status == 0, "the child ends well");
  }
}

int exit_code_of(const std::function<void()>& work) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    work();
    std::exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

void exit_while_under_way() {
  const std::size_t before = entries(folder.c_str());
  const auto begin_some = [](Disk& disk, std::vector<Copy>& copies) {
    static auto* const values = new std::vector<Value>;
    for (unsigned i = 0; i < 4; ++i) values->emplace_back(8 * kMiB, i, 0);
    for (const Value& value : *values) copies.push_back(write(disk, value));
    copies[0]->wait();
    copies[0]->read(values->front().begin);
  };
  expect(exit_code_of([&] {
           static auto* const disk = new TestDisk(options());
           static auto* const copies = new std::vector<Copy>;
           begin_some(*disk, *copies);
         }) == 0, "a disk that nobody destroys");
  expect(exit_code_of([&] {
           static TestDisk disk(options());
           static std::vector<Copy> copies;
           begin_some(disk, copies);
         }) == 0, "one that is destroyed at exit, after its copies");
  expect(exit_code_of([&] {
           static std::vector<Copy> copies;
           static TestDisk disk(options());
           begin_some(disk, copies);
         }) == 0, "and before");
  expect(exit_code_of([&] {
           begin_some(*new TestDisk(options()), *new std::vector<Copy>);
           kill(getpid(), SIGKILL);
         }) == SIGKILL, "a process that is killed");
  expect(entries(folder.c_str()) == before, "leaves no file");
}

#else
void a_fork() {}
void exit_while_under_way() {}
#endif

}  // namespace

Tests process_tests() {
  return {
      {"nothing_is_left", nothing_is_left},
      {"fork", a_fork},
      {"exit", exit_while_under_way},
  };
}

}  // namespace rematfn
