// What a rank tells the others about itself when a group begins: one blob, a few hundred bytes.
//
// Transports and the engine put their parts in as opaque bytes. The parser assumes that the bytes
// come from an enemy; what it lets through has the right form, not necessarily the right content.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bootstrap/process_id.h"
#include "common/config.h"
#include "common/error.h"
#include "common/types.h"

namespace smddp::bootstrap {

struct Introduction {
  std::string libraryVersion;
  std::string host;
  int32_t pid = 0;
  ProcessId processId{};
  // Candidates for shared memory have equal names (node_name.h). Equal agreements, if not 0, say
  // that these processes have already reached one another's memory (locality.h).
  std::string nodeName;
  uint64_t nodeAgreement = 0;
  // The settings that must be equal on all ranks and are not at their default, as "NAME=value\n"… .
  std::string settings;
  std::vector<std::byte> slab;      // how mates attach our memory
  std::vector<std::byte> fabric;    // address for other nodes; empty: single node only
  std::vector<std::byte> lifeline;  // Lifeline::address()
  std::vector<std::byte> group;     // what concerns this group only
  // Why this rank cannot take part; then the others shall not wait for it, but raise this too.
  std::string trouble;
  ErrorKind troubleKind = ErrorKind::Internal;
};

// Host, pid, node name, settings and version of this process; the caller adds the rest.
Introduction introduceThisProcess(const Settings& settings, const ProcessId& id);

// Raises the trouble of the first rank that has any. On that rank itself it need not be said whose it is.
void checkTrouble(const std::vector<Introduction>& introductions, Rank me);

// "rank 3", "ranks 0-3, 5": ascending ranks.
std::string listRanks(const std::vector<Rank>& ranks);

// "rank 3 (node7, pid 4711)": how every error calls a rank.
std::string describe(Rank rank, const Introduction& introduction);

// Throws Usage when a field is too long.
std::vector<std::byte> serialise(const Introduction& introduction);
// Throws Mismatch when another version of the library wrote it, Transport when it is malformed;
// both name `from`.
Introduction parseIntroduction(std::span<const std::byte> blob, Rank from);

// Throws Mismatch naming two ranks that differ in version or settings, and for each such setting which
// ranks have which value. All ranks that check the same introductions throw the same text.
void checkAgreement(const std::vector<Introduction>& introductions);

}  // namespace smddp::bootstrap
