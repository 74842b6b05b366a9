// SPDX-License-Identifier: Apache-2.0
#include "base/errors.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string_view>

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

struct Unit {
  std::string_view name;
  std::size_t bytes;
};
constexpr std::array<Unit, 5> kBinary{
    {{"B", 1}, {"KiB", 1ULL << 10}, {"MiB", 1ULL << 20}, {"GiB", 1ULL << 30}, {"TiB", 1ULL << 40}}};
constexpr std::array<Unit, 5> kDecimal{{{"B", 1},
                                        {"kB", 1'000},
                                        {"MB", 1'000'000},
                                        {"GB", 1'000'000'000},
                                        {"TB", 1'000'000'000'000}}};

const Unit* find_unit(const std::array<Unit, 5>& units, const std::string& name) {
  const auto* found = std::find_if(units.begin(), units.end(),
                                   [&](const Unit& unit) { return unit.name == name; });
  return found == units.end() ? nullptr : found;
}

// Rounded up, so that what is printed is enough when typed back in. It shows two decimals at the most; more
// where less than one unit is shown, for three digits.
Figure written_in(const Unit& unit, std::size_t nbytes) {
  using Wide = unsigned __int128;
  std::size_t scale = 100;
  int decimals = 2;
  for (; nbytes > 0 && Wide{scale} * nbytes < Wide{100} * unit.bytes && decimals < 14; ++decimals) scale *= 10;
  const Wide parts = (Wide{nbytes} * scale + unit.bytes - 1) / unit.bytes;
  std::string digits = std::to_string(static_cast<std::size_t>(parts % scale));
  digits = std::to_string(static_cast<std::size_t>(parts / scale)) + "." +
           std::string(static_cast<std::size_t>(decimals) - digits.size(), '0') + digits;
  while (digits.back() == '0') digits.pop_back();
  if (digits.back() == '.') digits.pop_back();
  const Wide bytes = std::min<Wide>(parts * unit.bytes / scale, std::numeric_limits<std::size_t>::max());
  return {static_cast<std::size_t>(bytes), digits + " " + std::string(unit.name)};
}

Figure in_largest_unit(const std::array<Unit, 5>& units, std::size_t nbytes) {
  const auto* unit = units.begin();
  while (unit + 1 != units.end() && written_in(*unit, nbytes).bytes >= (unit + 1)->bytes) ++unit;
  return written_in(*unit, nbytes);
}

}  // namespace

std::string format_bytes(std::size_t nbytes, const Wording& wording) {
  const bool is_decimal = find_unit(kBinary, wording.unit) == nullptr && !wording.unit.empty();
  return in_largest_unit(is_decimal ? kDecimal : kBinary, nbytes).text;
}

Figure figure_of(std::size_t nbytes, const Wording& wording) {
  const auto and_bytes = [](const std::string& text, std::size_t bytes) {
    return Figure{bytes, text + " (" + std::to_string(bytes) + " bytes)"};
  };
  if (nbytes > 0 && nbytes <= wording.peak) {
    // Three digits.
    const auto peak = static_cast<double>(wording.peak);
    const double share = static_cast<double>(nbytes) / peak;
    double scale = 1000;
    int decimals = 3;
    for (; share * scale < 100; ++decimals) scale *= 10;
    for (double parts = std::ceil(share * scale);; ++parts) {
      std::array<char, 64> text{};
      std::snprintf(text.data(), text.size(), "%.*f", decimals, std::min(1.0, parts / scale));
      const double fraction = std::strtod(text.data(), nullptr);
      const auto bytes = static_cast<std::size_t>(fraction * peak);
      if (bytes < nbytes && fraction < 1) continue;  // rounding took a byte
      return and_bytes(std::string(text.data()) + " of the unconstrained peak", bytes);
    }
  }
  for (const auto* units : {&kBinary, &kDecimal}) {
    const Unit* unit = find_unit(*units, wording.unit);
    if (unit != nullptr && unit->bytes > 1) return written_in(*unit, nbytes);
  }
  const Figure found = in_largest_unit(kBinary, nbytes);
  return found.bytes < kBinary[1].bytes ? found : and_bytes(found.text, found.bytes);
}

}  // namespace rematfn
