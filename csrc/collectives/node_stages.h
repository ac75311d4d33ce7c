// What the two-level allreduces and reduces do inside a node, before and after the exchange between
// nodes.
//
// A chunk is cut into one share per rail. Before the exchange the rank on rail k owns the sum of
// share k over its node, in its *partial* slot; after it, every *reader* of the node has every
// share of the result. All ranks are readers, of a reduce only the root.
//
//                staged                                         shared buffers
//   copy in      others' shares of my input to my slot          –
//   sum          my share, local ranks ascending, to partial    the same, from the mates' inputs
//   … exchange …
//   gather       others' results from their partial slots       wait until they are in my output
//
// The exchange between nodes, what it sends and how the vector is cut, is the same in both.
#pragma once

#include <vector>

#include "collectives/collective.h"
#include "collectives/cutting.h"

namespace smddp::collectives {

class NodeStages {
 public:
  // Counters; the exchange may use those from kFirstFree on.
  static constexpr int kCopied = 1;    // my contribution to chunk c is in my slot
  static constexpr int kSummed = 2;    // my share of chunk c is in my partial slot
  static constexpr int kReady = 3;     // my share of the result is where results() says
  static constexpr int kGathered = 4;  // I have copied the others' results
  static constexpr int kFirstFree = 5;

  // Declares the pools. `chunkBytes` is what the exchange would like; it becomes less where the
  // staging memory is too small.
  NodeStages(plan::Builder& b, const Shape& shape, int64_t chunkBytes);

  int64_t chunkBytes() const { return chunkBytes_; }
  // A share's granules in a full chunk.
  int64_t shareBytes() const { return shareBytes_; }
  // How many chunks may be between "sum" and "gather"; also how many partial slots there are.
  int64_t depth() const { return depth_; }

  // Every rank.
  void copyIn(const plan::Chunk& c);
  // Ranks on a rail. Opens stage "sum"; the puts that used this partial slot before must have been
  // flushed.
  void sum(const plan::Chunk& c);
  // Orders the steps that follow in this lane after my sum of the chunk.
  void awaitSum(const plan::Chunk& c);
  // Says that my share is done with: what readers need of it is where they find it, and of the puts
  // from my partial slot only those of the result may be under way.
  void ready(const plan::Chunk& c);
  // Every rank.
  void gather(const plan::Chunk& c);

  // Part i of `parts` of my share.
  plan::Range shard(const plan::Chunk& c, int i, int parts) const;
  plan::Ref partial(const plan::Chunk& c, int64_t offset) const;
  // Where the final values at this offset must go, besides my partial slot, for the readers of my
  // node to have them.
  std::vector<plan::Ref> outputs(int64_t offset);
  bool staged() const { return staged_; }

 private:
  bool isReader(int local) const { return everybodyReads_ || local == soleReader_; }
  plan::Ref partialOf(int rail, const plan::Chunk& c, int64_t offset) const;

  plan::Builder& b_;
  const plan::Topology& t_;
  bool staged_;
  bool everybodyReads_;
  int soleReader_ = -1;  // a local rank, or none of my node
  int64_t depth_ = 0;
  int64_t chunkBytes_ = 0;
  int64_t shareBytes_ = 0;
  uint8_t contributions_ = 0;
  uint8_t partials_ = 0;
};

}  // namespace smddp::collectives
