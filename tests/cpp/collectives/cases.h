// Shared by the tests of algorithms: the list of algorithms, the cases in which they are tested, and the Execution of a
// case for the checker.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "collectives/collective.h"
#include "plan/checker.h"

namespace smddp::collectives {

using Nodes = std::vector<std::vector<Rank>>;

struct NamedAlgorithm {
  std::string name;
  Collective collective;
  Algorithm build;
  bool oneNode = false;      // cannot serve several nodes
  bool needsShared = false;  // cannot serve private buffers
  // All elements are reduced in the same association. False for the ring: its shards begin at different nodes. And
  // where messages are encoded: each server rounds the contributions of all nodes but its own.
  bool oneOrder = true;
  Wire wire = Wire::fp32;
  bool feedback = false;

  bool serves(const Nodes& nodes) const { return !oneNode || nodes.size() == 1; }
};
std::ostream& operator<<(std::ostream& out, const NamedAlgorithm& algorithm);

const std::vector<NamedAlgorithm>& allAlgorithms();
// Every second one: the others with the next TEST_TURN, and all with ALL_SEEDS=1.
std::vector<NamedAlgorithm> halfOf(const std::vector<NamedAlgorithm>& algorithms);

inline constexpr int64_t kElementBytes = 4;

// One collective on one group; buffers may be shared on some nodes and private on others.
struct Case {
  NamedAlgorithm algorithm;
  Nodes nodes;
  plan::Limits limits;
  int64_t bytes = 0;
  Rank root = 0;
  std::vector<bool> sharedOnNode;

  plan::Execution execution() const;
};
std::ostream& operator<<(std::ostream& out, const Case& c);

// All nodes shared, none, and every other one, as far as the algorithm can serve that.
std::vector<std::vector<bool>> sharingsOf(const NamedAlgorithm& algorithm, const Nodes& nodes);

// Limits so small that short vectors have many chunks.
plan::Limits smallLimits(int64_t window);

plan::Verdict checkRepeated(const Case& c, int times);

}  // namespace smddp::collectives
