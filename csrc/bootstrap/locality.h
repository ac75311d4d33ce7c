// Decides which ranks form a node, from the reports which pairs of ranks reached each other's memory. It is arithmetic
// only; rendezvous.h collects the reports. All ranks have the same reports, and so get the same result.
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
  // The value for this rank's next Introduction::nodeAgreement. Processes with equal agreements need not probe each
  // other again, so a sub-group of a known group needs no second round.
  uint64_t agreement = 0;
  // The reasons why candidates do not share memory, for the log; empty if all do.
  std::vector<std::string> warnings;
};

// The ranks whose memory one rank could not reach.
struct ProbeReport {
  struct Failure {
    Rank rank;
    std::string why;
    // The reporting process is out of descriptors or address space; the failure says nothing about the pair.
    bool exhausted = false;
  };
  std::vector<Failure> failures;
};

std::vector<std::byte> serialise(const ProbeReport& report);
// Throws Transport, naming `from`, if the report is malformed or names a rank outside the group.
ProbeReport parseProbeReport(std::span<const std::byte> blob, Rank from, int size);

// True if some candidates are not yet known to share memory. Equal on all ranks.
bool needsProbing(const std::vector<Introduction>& introductions);

// `reports` has one entry per rank, or none if no probing was needed. Candidates form a node if each has reached all
// the others. Otherwise, if the names come from the system, each rank becomes a node of its own, with a warning; if the
// user chose the names, it throws Usage; if a rank is exhausted, it throws Resource.
Locality decideLocality(const std::vector<Introduction>& introductions,
                        const std::vector<ProbeReport>& reports, Rank me);

}  // namespace smddp::bootstrap
