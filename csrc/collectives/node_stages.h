// The stages of two-level allreduces and reduces inside a node, before and after the exchange between nodes.
//
// A chunk is cut into one share per rail. Before the exchange the rank on rail k owns the sum of share k over its
// node, in its *partial* slot. After it every *reader* of the node has every share of the result. In an allreduce
// all ranks are readers, in a reduce only the root.
//
//                staged                                         shared buffers
//   copy in      others' shares of my input to my slot          –
//   sum          my share, local ranks ascending, to partial    the same, from the mates' inputs
//   … exchange …
//   gather       others' results from their partial slots       wait until they are in my output
//
// The exchange between nodes is the same in both: it sends the same messages and cuts the vector in the same way.
#pragma once

#include <optional>
#include <vector>

#include "collectives/collective.h"
#include "collectives/cutting.h"

namespace smddp::collectives {

class NodeStages {
 public:
  // Counters; the exchange may use those from kFirstFree on.
  static constexpr int kCopied = 1;    // my contribution to chunk c is in my slot
  static constexpr int kSummed = 2;    // my share of chunk c is in my partial slot
  static constexpr int kReady = 3;     // my share of the result is where readers find it
  static constexpr int kGathered = 4;  // I have copied the others' results
  static constexpr int kFirstFree = 5;

  // The staging memory that an exchange needs beside the contributions of the node's ranks.
  struct Needs {
    bool partials =
        true;  // false: it sends and sums straight in its buffers, and does not call partial()
    int64_t slots = 0;  // slots of its own, each as long as a share
  };
  // Declares the pools. `chunkBytes` is the chunk that the exchange prefers; it is made smaller if the staging
  // memory is too small.
  NodeStages(plan::Builder& b, const Shape& shape, int64_t chunkBytes, Needs needs);
  NodeStages(plan::Builder& b, const Shape& shape, int64_t chunkBytes)
      : NodeStages(b, shape, chunkBytes, Needs{}) {}

  int64_t chunkBytes() const { return chunkBytes_; }
  // The largest share of a full chunk.
  int64_t shareBytes() const { return shareBytes_; }
  // The number of partial slots, and of chunks that may be between "sum" and "gather" (see cutting.h).
  int64_t depth() const { return depth_; }

  // Called on every rank.
  void copyIn(const plan::Chunk& c);
  // Called on ranks on a rail. Opens stage "sum". The puts that used this partial slot before must have been
  // flushed.
  void sum(const plan::Chunk& c);
  // These three do what sum() does, in parts: beginSum(), sumTo() for all parts of my share, endSum().
  void beginSum(const plan::Chunk& c);
  void sumTo(std::vector<plan::Ref> destinations, const plan::Chunk& c, const plan::Range& part,
             std::optional<plan::Ref> residual = {});
  void endSum(const plan::Chunk& c);
  // Makes the following steps of this lane wait for my sum of the chunk.
  void awaitSum(const plan::Chunk& c);
  // Signals that my share of the result is complete and where readers find it. Of the puts from my partial slot,
  // only those of the result may still be in flight.
  void ready(const plan::Chunk& c);
  // Called on every rank.
  void gather(const plan::Chunk& c);

  // Part i of `parts` of my share.
  plan::Range shard(const plan::Chunk& c, int i, int parts) const;
  plan::Ref partial(const plan::Chunk& c, int64_t offset) const;
  // The outputs to which I must write the final values at this offset, besides my partial slot, so that the readers
  // of my node get them.
  std::vector<plan::Ref> outputs(int64_t offset);
  bool staged() const { return staged_; }

 private:
  bool isReader(int local) const { return everybodyReads_ || local == soleReader_; }
  plan::Ref partialOf(int rail, const plan::Chunk& c, int64_t offset) const;

  plan::Builder& b_;
  const plan::Topology& t_;
  bool staged_;
  bool everybodyReads_;
  int soleReader_ = -1;  // of a reduce: the root's local rank, or -1 if it is on another node
  int64_t depth_ = 0;
  int64_t chunkBytes_ = 0;
  int64_t shareBytes_ = 0;
  uint8_t contributions_ = 0;
  uint8_t partials_ = 0;
};

}  // namespace smddp::collectives
