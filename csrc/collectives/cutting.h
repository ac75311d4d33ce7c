// Helpers of the algorithms: how vectors are cut into chunks, and in which order a rank addresses the others.
//
// Reuse of slots. Chunk c takes slot c % depth of a pool, which chunk c - depth had before. Counters count chunks: a
// counter has the value c + 1 when its rank is done with chunk c. So before chunk c is written, one waits for
//
//   c + 1 - depth
//
// of the ranks that used the slot. With 4 slots, chunk 6 takes slot 2 after chunk 2, and waits for the value 6 + 1 - 4
// = 3. Chunk 3 waits for 0, that is, not at all: it is the first in its slot. Flushes count puts: if each chunk makes p
// puts to a peer, one flushes (c + 1 - depth) * p of them.
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
// True if the ranks of a node pass bytes to each other through slots. A rank alone on its node needs no slots.
inline bool isStaged(const plan::Topology& t, bool shared) { return !shared && t.teamSize() > 1; }

// Rounds a chunk down to granules and makes it not longer than the vector.
constexpr int64_t clipChunk(int64_t chunkBytes, int64_t bytes) {
  return std::min(wholeGranules(chunkBytes), std::max(granulesIn(bytes), int64_t{1}) * kGranule);
}

// The number of slots of a pool, and so the number of chunks by which one stage may run ahead of another.
inline int64_t pipelineDepth(const plan::Limits& limits) {
  return std::clamp<int64_t>(limits.window, 1, 4);
}

// All nodes but mine, from the next one on. So the senders start at different receivers and do not all send to the
// same one at once.
inline std::vector<int> otherNodes(const plan::Topology& t) {
  std::vector<int> nodes;
  for (int step = 1; step < t.numNodes(); ++step) {
    nodes.push_back((t.myNode() + step) % t.numNodes());
  }
  return nodes;
}

// The local indices of my mates, from the next one on.
inline std::vector<int> otherMates(const plan::Topology& t) {
  std::vector<int> mates;
  for (int step = 1; step < t.teamSize(); ++step) {
    mates.push_back((t.myLocal() + step) % t.teamSize());
  }
  return mates;
}

// Waits for my mates that are on a rail. The others own no share.
inline void waitRails(plan::Builder& b, int counter, int64_t value) {
  const plan::Topology& t = b.topology();
  for (int mate : otherMates(t)) {
    if (mate < t.numRails()) b.waitRank(mate, counter, value);
  }
}

}  // namespace smddp::collectives
