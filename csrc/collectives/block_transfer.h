// Gather, scatter and all-to-all: blocks that go from one rank to one other rank, as they are.
//
// They differ in which pairs of ranks have a block, and in where it lies; how it travels is the same. Inside a
// node the receiver takes it from the sender's slot. Between nodes it goes by a rail, in one hop: rank k of
// the sender's node sends it to rank k of the receiver's node. Which rail carries it follows from the local
// rank of its receiver, so that most blocks come straight to whom they are for; for a gather, whose blocks
// all have the same receiver, of its sender. For each chunk of a block:
//
//                staged                                      shared buffers
//   copy in      my blocks, but for those that I send        –
//                myself, to my slot
//   send         what my rail carries, from my input or      the same, from the mates' inputs
//                the mates' slots
//   sent         I say that these have left                  the same
//   receive      what my rail carries, to my output or, for  the same, to the mates' outputs
//                mates, to my slots
//   take         my mates' blocks for me from their slots    from their inputs
//   give         –                                           gather only: my block into the root's output
//   copy out     what other rails have received for me       –
//   finish       –                                           I wait until nobody uses my buffers any more
//
// No rank waits for more than its part; those that take no part in a stage do not have it.
#pragma once

#include <set>

#include "collectives/carried_blocks.h"

namespace smddp::collectives {

class BlockTransfer : public BlockExchange {
 public:
  BlockTransfer(plan::Builder& b, const Shape& shape);
  // All steps, after the pools.
  plan::Plan build();

 private:
  // Who has a block for whom.
  bool sends(Rank r) const { return sender_ < 0 || r == sender_; }
  bool receives(Rank r) const { return receiver_ < 0 || r == receiver_; }
  int carrierOf(int senderLocal, int receiverLocal) const {
    return blocks_.carrierOf(receiver_ < 0 ? receiverLocal : senderLocal);
  }

  // Where blocks lie.
  int64_t inputPlace(Rank to, const plan::Chunk& c) const;
  int64_t outputPlace(Rank from, const plan::Chunk& c) const;
  plan::Ref block(int fromMate, Rank to, const plan::Chunk& c) const;
  plan::Ref arrivedSlot(int rail, const plan::Chunk& c, int64_t i) const;

  template <typename Visit>
  void forEachPair(int rail, Visit visit) const;
  template <typename Visit>
  void forEachArrival(int rail, Visit visit) const;
  void findMyBlocks();

  // One chunk of each stage.
  void copyIn(const plan::Chunk& c);
  void send(const plan::Chunk& c);
  void receive(const plan::Chunk& c);
  void take(const plan::Chunk& c);
  void give(const plan::Chunk& c);
  void copyOut(const plan::Chunk& c);
  void finish(int64_t numChunks);

  const bool isGather_;
  const Rank sender_, receiver_;  // the only one, or -1
  const bool gives_;              // inside a node the sender moves the block, not the receiver
  std::vector<Rank> staging_;     // the receivers of those of my blocks that others read
  std::set<int> myCarriers_;      // mates that send blocks of mine
  std::set<int> sendsTo_;         // nodes
  std::set<int> carriesFrom_;     // mates whose blocks I send
  std::set<int> carriesTo_;       // mates for whom I receive blocks
  std::set<int> deliverers_;      // mates that receive blocks for me
  int64_t mostArrivals_ = 0;      // slots for what a rail receives for mates
  uint8_t contributions_ = 0, arrived_ = 0;
};

}  // namespace smddp::collectives
