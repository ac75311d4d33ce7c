// Gather, scatter and all-to-all: every block goes unchanged from one rank to one other rank.
//
// The three differ in which pairs of ranks have a block, and where it lies. The transport is the same. Inside a node
// the receiver copies the block from the sender's slot. Between nodes it goes over a rail, in one hop: rank k of the
// sender's node sends it to rank k of the receiver's node. The local rank of the receiver selects the rail, so that
// most blocks arrive at the rank that they are for. In a gather all blocks have one receiver; there the local rank of
// the sender selects the rail. For each chunk of a block, a rank
//
//                staged                                      shared buffers
//   copy in      copies its blocks to its slot, except       –
//                those that it sends itself
//   send         sends the blocks that its rail carries,     sends them from the mates' inputs
//                from its input or the mates' slots
//   sent         signals that the sends have completed       the same
//   receive      receives the blocks that its rail carries,  copies the latter to the mates' outputs
//                to its output or, for mates, to its slots
//   take         copies its mates' blocks from their slots   copies them from their inputs
//   give         –                                           gather only: copies its block to the root's output
//   copy out     copies the blocks that other rails have     –
//                received for it
//   finish       –                                           waits until nobody uses its buffers any more
//
// A rank has only the stages in which it takes part, and waits only for the ranks that it depends on.
#pragma once

#include <set>

#include "collectives/carried_blocks.h"

namespace smddp::collectives {

class BlockTransfer : public BlockExchange {
 public:
  BlockTransfer(plan::Builder& b, const Shape& shape);
  // Writes all steps; the constructor has declared the pools.
  plan::Plan build();

 private:
  // Which ranks send, which receive, and which rail carries a block.
  bool sends(Rank r) const { return sender_ < 0 || r == sender_; }
  bool receives(Rank r) const { return receiver_ < 0 || r == receiver_; }
  int carrierOf(int senderLocal, int receiverLocal) const {
    return blocks_.carrierOf(receiver_ < 0 ? receiverLocal : senderLocal);
  }

  // The places of blocks in buffers and slots.
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
  const Rank sender_, receiver_;  // the only one, or -1 if all ranks send, or receive
  const bool gives_;              // inside a node the sender copies the block, not the receiver
  std::vector<Rank> staging_;     // the receivers of my blocks that go through my slot
  std::set<int> myCarriers_;      // mates that send blocks of mine
  std::set<int> sendsTo_;         // nodes
  std::set<int> carriesFrom_;     // mates whose blocks I send
  std::set<int> carriesTo_;       // mates for whom I receive blocks
  std::set<int> deliverers_;      // mates that receive blocks for me
  int64_t mostArrivals_ = 0;      // slots for what a rail receives for mates
  uint8_t contributions_ = 0, arrived_ = 0;
};

}  // namespace smddp::collectives
