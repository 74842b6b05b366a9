// SPDX-License-Identifier: Apache-2.0
#include "engine/way.h"

#include <stdexcept>
#include <string>

#include "engine/drop.h"
#include "engine/table.h"

namespace rematfn {
namespace {

[[noreturn]] void has_no_copies(const Way& way) {
  throw std::logic_error("rematfn: nothing has a copy that went by the way " +
                         std::string(way.name()));
}

}  // namespace

Place Way::bring_back(Version&) { has_no_copies(*this); }
bool Way::has_arrived(const Version&) const { return true; }
Place Way::wait(Version&) { has_no_copies(*this); }
void Way::turn_back(Version&) { has_no_copies(*this); }
void Way::discard(Version&) { has_no_copies(*this); }

bool Drop::applies(const Version& version) const { return static_cast<bool>(version.producer); }
double Drop::cost(const Version& version) const { return version.producer->cost; }

Place Drop::leave(Version& version) {
  store_.drop(version);
  return Place::kAway;
}

}  // namespace rematfn
