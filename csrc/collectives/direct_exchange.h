// The direct exchange between nodes: a parameter server that is spread over all ranks. Allreduce and
// reduce differ in which nodes get the results.
//
// Each rail's share of a chunk is cut into one shard per *server*. All nodes serve, unless shards would be shorter
// than 16 KiB (of a reduce, 64 KiB), where latency dominates the cost of a message. Then fewer nodes serve, and each
// rail begins with another node, so that the load is balanced. If one server is left and only one node gets the
// result, that node serves.
// Example: 4 nodes, 2 rails, shares of 32 KiB. There are 2 servers: nodes 0 and 1 for rail 0, nodes 2 and 3 for
// rail 1.
//
// If every node has one rank, nothing is summed before the exchange. Shards then leave from the input, and results from
// the output, without a copy.
//
// If the shape has a wire format, shards and results are encoded as they are summed, and leave from slots of their own.
// A result is encoded once, and everybody takes what it decodes to, the server as well: so all ranks get the same bits.
// Each server's own contribution is not encoded; nor is the result of a reduce on the root's node.
//
// With error feedback each rank keeps what its encodings lose: of my contribution in the shards of other servers, and
// of the result in my own shard. They are different parts of the vector, so one residual is enough.
#pragma once

#include <optional>
#include <vector>

#include "collectives/node_stages.h"

namespace smddp::collectives {

// The steps of one rank on a rail.
class DirectExchange {
 public:
  // The stages inside nodes, with the chunk length that suits this exchange.
  static NodeStages stagesFor(plan::Builder& b, const Shape& shape);

  DirectExchange(plan::Builder& b, NodeStages& node, const Shape& shape);

  // Stage "sum": sums my share over my node, if it has several ranks, and sends each server its shard.
  void sumAndScatter(const plan::Chunk& c);
  // Stage "serve": sums my shard of all nodes, in their order, and sends the result to the nodes that get results.
  void serve(const plan::Chunk& c);
  // Stage "collect": receives the other servers' results.
  void collect(const plan::Chunk& c);
  // Flushes the last puts. A later plan uses the slots again and does not know of these puts.
  void finish();

 private:
  // The shard that node n serves. The node does not serve if this is >= numServers_.
  int shardIndex(int n) const { return (n - firstServer_ + t_.numNodes()) % t_.numNodes(); }
  bool serves(int n) const { return shardIndex(n) < numServers_; }
  bool getsResults(int n) const { return resultNode_ < 0 || n == resultNode_; }
  bool encodes() const { return wire_ != Wire::fp32; }
  bool encodesResults() const { return encodes() && !receivers_.empty(); }
  // Whether my results lie in my output only.
  bool putsFromOutput() const {
    return t_.isFlat() && getsResults(t_.myNode()) && !encodesResults();
  }
  std::optional<plan::Ref> residual(int64_t offset) const;
  // The encoded range of my contribution to the shard of node n.
  plan::Ref encodedShard(const plan::Chunk& c, int n) const;
  // Stage "sum" if shards are encoded.
  void encodeAndScatter(const plan::Chunk& c);
  plan::Ref receive(Rank peer, int stream, int64_t length);
  // The contribution of my node, and the result, at this offset of the vector.
  plan::Ref contribution(const plan::Chunk& c, int64_t offset) const;
  plan::Ref result(const plan::Chunk& c, int64_t offset) const;
  // Slots for results are used again; the puts of the last use must be flushed.
  void freeResultSlot(const plan::Chunk& c);
  plan::Range shardOf(const plan::Chunk& c, int n) const {
    return node_.shard(c, shardIndex(n), numServers_);
  }

  plan::Builder& b_;
  const plan::Topology& t_;
  NodeStages& node_;
  const Wire wire_;
  const bool feedback_;
  uint8_t shards_ = 0, results_ = 0;  // pools of encoded ranges
  int resultNode_ = -1;               // the only node that gets results, or -1 if all do
  int numServers_ = 1, firstServer_ = 0;
  bool iServe_ = false;
  std::vector<int> others_;
  std::vector<Rank> receivers_;  // the ranks of other nodes that get my results
};

}  // namespace smddp::collectives
