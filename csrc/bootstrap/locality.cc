#include "bootstrap/locality.h"

#include <map>

#include "bootstrap/blob.h"
#include "bootstrap/node_name.h"
#include "common/error.h"
#include "common/fnv.h"

namespace smddp::bootstrap {
namespace {

constexpr size_t kMaxWhyBytes = 256;

// The ranks with the same node name, in ascending order.
using Candidates = std::vector<Rank>;

std::map<std::string, Candidates> candidatesByName(const std::vector<Introduction>& introductions) {
  std::map<std::string, Candidates> result;
  for (size_t rank = 0; rank < introductions.size(); ++rank) {
    result[introductions[rank].nodeName].push_back(static_cast<Rank>(rank));
  }
  return result;
}

// True if they have all reached each other before, or if there is only one.
bool areAcquainted(const Candidates& candidates, const std::vector<Introduction>& introductions) {
  if (candidates.size() == 1) return true;
  const uint64_t agreement = introductions[candidates.front()].nodeAgreement;
  for (const Rank rank : candidates) {
    if (introductions[rank].nodeAgreement != agreement) return false;
  }
  return agreement != 0;
}

// A number for this set of processes, by their random ids; never 0.
uint64_t agreementOf(const Candidates& candidates, const std::vector<Introduction>& introductions) {
  Fnv1a hash;
  for (const Rank rank : candidates) hash.add(introductions[rank].processId);
  return hash.digest() | 1;
}

// The first pair of candidates that cannot share memory, as a sentence; empty if all can. Throws if a rank lacks
// resources, because the network would need even more of them.
std::string firstFailure(const Candidates& candidates,
                         const std::vector<Introduction>& introductions,
                         const std::vector<ProbeReport>& reports) {
  for (const Rank rank : candidates) {
    if (reports[rank].failures.empty()) continue;
    // A rank probes its candidates only, so the named rank is one of them.
    const auto& failure = reports[rank].failures.front();
    const std::string text =
        fmt::format("{} cannot attach the memory of {}: {}", describe(introductions[rank]),
                    describe(introductions[failure.rank]), failure.why);
    if (failure.exhausted) throw Error(ErrorKind::Resource, text);
    return text;
  }
  return "";
}

}  // namespace

std::vector<std::byte> serialise(const ProbeReport& report) {
  BlobWriter writer;
  writer.number(static_cast<uint32_t>(report.failures.size()));
  for (const auto& failure : report.failures) {
    writer.number(static_cast<uint32_t>(failure.rank));
    writer.text("why", failure.why.substr(0, kMaxWhyBytes), kMaxWhyBytes);
    writer.number(static_cast<uint8_t>(failure.exhausted));
  }
  return writer.take();
}

ProbeReport parseProbeReport(std::span<const std::byte> blob, Rank from, int size) {
  try {
    BlobReader reader(blob);
    const auto count = reader.number<uint32_t>("count");
    ProbeReport report;
    for (uint32_t i = 0; i < count; ++i) {
      const auto rank = reader.number<uint32_t>("rank");
      if (rank >= static_cast<uint32_t>(size)) throw BlobError(fmt::format("rank {}", rank));
      std::string why = reader.text("why", kMaxWhyBytes);
      const bool exhausted = reader.number<uint8_t>("exhausted") != 0;
      report.failures.push_back({static_cast<Rank>(rank), std::move(why), exhausted});
    }
    reader.end();
    return report;
  } catch (const BlobError& error) {
    raise(ErrorKind::Transport,
          "what rank {} published in the store about its neighbours is malformed: {}; is another "
          "program "
          "using the same store and group name?",
          from, error.what());
  }
}

bool needsProbing(const std::vector<Introduction>& introductions) {
  for (const auto& [name, candidates] : candidatesByName(introductions)) {
    if (!areAcquainted(candidates, introductions)) return true;
  }
  return false;
}

Locality decideLocality(const std::vector<Introduction>& introductions,
                        const std::vector<ProbeReport>& reports, Rank me) {
  Locality result;
  result.nodeOfRank.resize(introductions.size());
  for (const auto& [name, candidates] : candidatesByName(introductions)) {
    const bool mine = name == introductions[me].nodeName;
    const bool acquainted = areAcquainted(candidates, introductions);
    const std::string failure = acquainted ? "" : firstFailure(candidates, introductions, reports);
    if (failure.empty()) {
      for (const Rank rank : candidates) result.nodeOfRank[rank] = name;
      if (mine) {
        result.agreement =
            acquainted ? introductions[me].nodeAgreement : agreementOf(candidates, introductions);
      }
      continue;
    }
    if (isChosenNodeName(name)) {
      raise(ErrorKind::Usage,
            "SMDDP_NODE_ID says that they are on one node, but {}. Give every machine and every "
            "container "
            "with its own PID namespace a different SMDDP_NODE_ID, or unset it",
            failure);
    }
    for (const Rank rank : candidates) result.nodeOfRank[rank] = fmt::format("{}#{}", name, rank);
    result.warnings.push_back(fmt::format(
        "{} ranks on one machine go through the network, as they cannot share memory: {}",
        candidates.size(), failure));
  }
  return result;
}

}  // namespace smddp::bootstrap
