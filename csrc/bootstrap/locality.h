// From "which pairs reached each other's memory" to "who forms a node". Arithmetic only;
// rendezvous.h asks the processes. Every rank computes it from the same reports and so comes to the
// same result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bootstrap/introduction.h"
#include "common/types.h"

namespace smddp::bootstrap {

struct Locality {
  // One name per rank; equal names share memory.
  std::vector<std::string> nodeOfRank;
  // What I put into my next Introduction::nodeAgreement: among processes with equal agreements
  // nothing needs to be tried again, so a sub-group of a known group begins without a second round.
  uint64_t agreement = 0;
  // Why candidates do not share memory, for the log; empty when all went well.
  std::vector<std::string> warnings;
};

// The ranks whose memory one rank could not reach.
struct ProbeReport {
  struct Failure {
    Rank rank;
    std::string why;
    // Neither the pair nor the machine is to blame: the reporting process is out of descriptors or address space.
    bool exhausted = false;
  };
  std::vector<Failure> failures;
};

std::vector<std::byte> serialise(const ProbeReport& report);
// Throws Transport naming `from` when malformed or when it names a rank outside the group.
ProbeReport parseProbeReport(std::span<const std::byte> blob, Rank from, int size);

// Whether some candidates are not yet known to share memory. Equal on all ranks.
bool needsProbing(const std::vector<Introduction>& introductions);

// `reports` has one entry per rank, or none at all when no probing was needed. Candidates form a
// node if each reached all the others. If not: single-rank nodes and a warning when the names were
// probed, a Usage error when the user had chosen them, a Resource error when a rank is exhausted.
Locality decideLocality(const std::vector<Introduction>& introductions,
                        const std::vector<ProbeReport>& reports, Rank me);

}  // namespace smddp::bootstrap
