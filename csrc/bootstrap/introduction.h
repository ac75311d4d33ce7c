// The introduction: a rank describes itself to the others when a group begins. It is one blob of a few hundred bytes.
//
// Transports and the engine add their parts as opaque bytes. The parser assumes that the bytes may come from an
// attacker: an accepted introduction has the right form, but not necessarily the right content.
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
  int32_t groupSize = 0;  // how many ranks this one expects
  std::string host;
  int32_t pid = 0;
  ProcessId processId{};
  // Candidates for shared memory have equal names (node_name.h). If two agreements are equal and not 0, these
  // processes have already reached each other's memory (locality.h).
  std::string nodeName;
  uint64_t nodeAgreement = 0;
  // The settings that must be equal on all ranks and differ from their default, as "NAME=value\n"… .
  std::string settings;
  std::vector<std::byte> slab;      // mates attach our memory with this
  std::vector<std::byte> fabric;    // our address for other nodes; empty: single node only
  std::vector<std::byte> lifeline;  // Lifeline::address()
  std::vector<std::byte> group;     // the engine's data for this group only
  // The rank's number in the job, which texts have. Who reads the introduction knows it: it is not sent.
  Rank jobRank = 0;
};

// Host, pid, node name, settings and version of this process; the caller adds the rest.
Introduction introduceThisProcess(const Settings& settings, const ProcessId& id);

// Lists ascending ranks: "rank 3", "ranks 0-3, 5".
std::string listRanks(const std::vector<Rank>& ranks);

// Throws Mismatch unless two ranks can work together: the same version, settings, size of the group.
void checkAgreement(const Introduction& first, const Introduction& second);

// The number of a group's rank in the job, which texts have. `jobRanks` has them by rank; empty: the same. A number
// that is no rank stays as it is.
inline Rank jobRankOf(std::span<const Rank> jobRanks, Rank rank) {
  const auto index = static_cast<size_t>(rank);
  return index < jobRanks.size() ? jobRanks[index] : rank;
}

// Names a rank for errors: "rank 3 (node7, pid 4711)".
std::string describe(const Introduction& introduction);
// Names this process as a rank of the job, in the same form.
std::string describeThisProcess(Rank jobRank);

// Throws Usage if a field is too long.
std::vector<std::byte> serialise(const Introduction& introduction);
// `jobRank` is the rank that wrote it. Throws Mismatch if that has another version of the library, Transport if the
// bytes are malformed.
Introduction parseIntroduction(std::span<const std::byte> blob, Rank jobRank);

// Throws Mismatch if ranks differ in version or settings. The text names two such ranks, and for each setting that
// differs the ranks with each value. All ranks that check the same introductions throw the same text.
void checkAgreement(const std::vector<Introduction>& introductions);

}  // namespace smddp::bootstrap
