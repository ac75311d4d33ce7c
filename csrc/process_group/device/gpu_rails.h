// Calls among ranks on several nodes, each with a GPU of its own: NCCL inside the nodes, the host between them. A call
// is cut into chunks, and each chunk goes through three stages. Between nodes, rank k of a node talks to rank k of the
// other nodes. These ranks are a rail. Each rail carries a share of the chunk:
//
//                     the node, by NCCL   the rail, through the host   the node, by NCCL
//   all_reduce        reduce-scatter  ──► sum                     ──►  all-gather
//   reduce_scatter    reduce-scatter  ──► sum of blocks
//   all_gather                            all_gather              ──►  all-gather
//   broadcast         root's: broadcast ► broadcast               ──►  others': all-gather
//
// The first two stages are enqueued when the call is made, on a stream of their own. The third is enqueued when the
// rail has ended, on the stream of the call. So chunks overlap, and so do calls. Different threads enqueue the two
// halves. Each half comes in the order of the calls, which is the same on all ranks, but the ranks interleave the
// halves differently. So every node has two groups of NCCL, one for each half. The rail sums on the CPU, in the order
// of nodes.
//
// Threads: calls begin one after the other, in the order of the parent group; the rest runs on the thread that runs the
// engine's continuations. Owns the groups. An error ends the call. The parent group fails, the rail fails, and what
// NCCL has enqueued is aborted (nccl_group.h). No call begins in a group that has failed.
#pragma once

#include <deque>
#include <memory>
#include <mutex>

#include "process_group/device/nccl_group.h"
#include "process_group/device/turns.h"
#include "process_group/process_group.h"

namespace smddp::process_group::device {

class GpuRails : public std::enable_shared_from_this<GpuRails> {
 public:
  struct Groups {
    std::shared_ptr<NcclGroup> scatter, gather;        // of NCCL, among the node's ranks
    c10::intrusive_ptr<ProcessGroup> rail;             // among rank k of every node
    std::shared_ptr<engine::groups::Group> railGroup;  // the engine's group of the rail
  };
  GpuRails(std::shared_ptr<engine::Engine> engine, std::shared_ptr<engine::groups::Group> parent,
           c10::Device device, Groups groups);

  static bool serves(collectives::Collective collective);
  // Enqueues the first two stages of a call.
  std::shared_ptr<DeviceTurns> begin(const engine::calls::Request& request,
                                     const std::shared_ptr<DeviceCopies>& copies,
                                     CallMemoryPtr memory);
  // Makes the first call of each group of NCCL, which connects it: on the thread that makes groups, since no other
  // thread may use the store meanwhile. All ranks call it together; blocks.
  void connect();
  void abort();
  void shutdown();
  // Instead of shutdown(): ends without waiting for what is enqueued.
  void abandon();

 private:
  class Turns;
  friend class Turns;
  // A call has failed on this rank: tells the others, which wait for it.
  void fail(const Error& error);
  // The error that the parent has failed with. It has the user's numbers of ranks, whichever group met the error.
  std::optional<Error> failure() const { return engine_->failureOf(*parent_); }
  // Goes on with the oldest calls, as far as their rails have ended, on one thread at a time.
  void advanceQueue();

  const std::shared_ptr<engine::Engine> engine_;
  const std::shared_ptr<engine::groups::Group> parent_;
  const c10::Device device_;
  const Groups groups_;
  std::mutex mutex_;
  std::deque<std::shared_ptr<Turns>> queue_;  // guarded by mutex_
  bool busy_ = false;                         // a thread is in advanceQueue(); the same
  bool again_ = false;                        // and has to look once more; the same
};

}  // namespace smddp::process_group::device
