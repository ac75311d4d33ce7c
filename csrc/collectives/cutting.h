// How vectors are cut and in which order other nodes are addressed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "plan/builder.h"

namespace smddp::collectives {

using plan::kGranule;

constexpr int64_t divideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t granulesIn(int64_t bytes) { return divideUp(bytes, kGranule); }
// The most granules that fit into `bytes`, at least one.
constexpr int64_t wholeGranules(int64_t bytes) {
  return std::max(bytes / kGranule, int64_t{1}) * kGranule;
}
// Whether the ranks of a node hand bytes to each other through slots. A rank alone on its node
// keeps them.
inline bool isStaged(const plan::Topology& t, bool shared) { return !shared && t.teamSize() > 1; }

// A chunk need not be longer than the vector.
constexpr int64_t clipChunk(int64_t chunkBytes, int64_t bytes) {
  return std::min(wholeGranules(chunkBytes), std::max(granulesIn(bytes), int64_t{1}) * kGranule);
}

// Slots of a pool whose users run ahead of each other: chunk c takes the slot of chunk c - depth.
inline int64_t pipelineDepth(const plan::Limits& limits) {
  return std::clamp<int64_t>(limits.window, 1, 4);
}

// Every node but mine, from the next one on: senders that start at different receivers do not all
// meet at the same one.
inline std::vector<int> otherNodes(const plan::Topology& t) {
  std::vector<int> nodes;
  for (int step = 1; step < t.numNodes(); ++step) {
    nodes.push_back((t.myNode() + step) % t.numNodes());
  }
  return nodes;
}

// Every mate but me, from the next one on.
inline std::vector<int> otherMates(const plan::Topology& t) {
  std::vector<int> mates;
  for (int step = 1; step < t.teamSize(); ++step) {
    mates.push_back((t.myLocal() + step) % t.teamSize());
  }
  return mates;
}

// Waits for my mates that are on a rail; those beyond own nothing that one could wait for.
inline void waitRails(plan::Builder& b, int counter, int64_t value) {
  const plan::Topology& t = b.topology();
  for (int mate : otherMates(t)) {
    if (mate < t.numRails()) b.waitMate(mate, counter, value);
  }
}

}  // namespace smddp::collectives
