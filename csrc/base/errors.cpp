// SPDX-License-Identifier: Apache-2.0
#include "base/errors.h"

#include <array>
#include <cmath>
#include <cstdio>
#include <optional>

namespace rematfn {
namespace {

Raiser the_raiser = nullptr;

struct Raised {
  ErrorKind kind;
  std::string message;
};
thread_local std::optional<Raised> last_raised;

}  // namespace

void set_raiser(Raiser raiser) { the_raiser = raiser; }

void raise(ErrorKind kind, const std::string& message) {
  last_raised = Raised{kind, message};
  if (the_raiser != nullptr) the_raiser(kind, message);
  TORCH_CHECK(false, message);
}

void raise_quoted(const std::string& text) {
  if (!last_raised || text.find(last_raised->message) == std::string::npos) return;
  const auto [kind, message] = *last_raised;
  raise(kind, message);
}

std::string last_message() { return last_raised ? last_raised->message : ""; }

void check_replay(bool holds, const std::string& what) {
  if (!holds) raise(ErrorKind::kReplay, "rematfn could not replay: " + what + ".");
}

namespace {

constexpr std::array<const char*, 5> kUnits{"B", "KiB", "MiB", "GiB", "TiB"};

struct Printed {
  double hundredths;  // whole
  std::size_t unit;
};

// As rematfn.format_bytes does: rounded up, so that what is printed is enough when typed back in.
Printed printed(std::size_t nbytes) {
  auto value = static_cast<double>(nbytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return {std::ceil(value * 100), unit};
}

}  // namespace

std::string format_bytes(std::size_t nbytes) {
  const auto [hundredths, unit] = printed(nbytes);
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.2f", hundredths / 100);
  std::string digits(text.data());
  while (digits.back() == '0') digits.pop_back();
  if (digits.back() == '.') digits.pop_back();
  return digits + " " + kUnits[unit];
}

std::size_t as_printed(std::size_t nbytes) {
  const auto [hundredths, unit] = printed(nbytes);
  const long double bytes = std::ldexp(static_cast<long double>(hundredths), 10 * static_cast<int>(unit));
  return static_cast<std::size_t>(std::floor(bytes / 100));
}

}  // namespace rematfn
