// Calls among ranks on several nodes, each of which has a GPU of its own: NCCL inside the nodes, the host between them.
// What is moved is cut into chunks, each of which goes through three stages. Between nodes rank k of a node talks to
// rank k of the others, its rail, and a share of the chunk crosses there:
//
//                     the node, by NCCL   the rail, through the host   the node, by NCCL
//   all_reduce        reduce-scatter  ──► sum                     ──►  all-gather
//   reduce_scatter    reduce-scatter  ──► sum of blocks
//   all_gather                            all_gather              ──►  all-gather
//   broadcast         root's: broadcast ► broadcast               ──►  others': all-gather
//
// The first two are enqueued when the call is made, on a stream of their own; the third when the rail has ended, on the
// stream of the call. So chunks overlap, and calls do. Every node has two groups of NCCL, since the two halves are
// enqueued by different threads: each half comes in the order of the calls, which is the same on all ranks, but how the
// halves interleave differs. For the same reason a sum on the GPU (rail_sum.h) has a second rail for its second step,
// which is enqueued when the first has ended, before the third stage of the same chunk.
//
// Threads: calls begin one after the other, as their group sees to; the rest is on whichever thread runs the engine's
// continuations. Owns the groups. An error fails the call, and with it the parent group, the rail, and what NCCL
// has enqueued (nccl_group.h); no call begins in a group that has failed.
#pragma once

#include <deque>
#include <memory>
#include <mutex>

#include "process_group/device/nccl_group.h"
#include "process_group/device/rail_sum.h"
#include "process_group/device/turns.h"
#include "process_group/process_group.h"

namespace smddp::process_group::device {

class GpuRails : public std::enable_shared_from_this<GpuRails> {
 public:
  struct Groups {
    std::shared_ptr<NcclGroup> scatter, gather;  // of NCCL, among the node's ranks
    // A rank of each node; the second, if any, is of the same.
    std::vector<c10::intrusive_ptr<ProcessGroup>> rails;
    // What they are around.
    std::vector<std::shared_ptr<engine::Group>> railGroups;
  };
  GpuRails(std::shared_ptr<engine::Engine> engine, std::shared_ptr<engine::Group> parent,
           c10::Device device, Groups groups);

  static bool serves(collectives::Collective collective);
  // How reductions are summed between nodes; on all ranks alike, between calls.
  void use(std::unique_ptr<RailSum> sum) { sum_ = std::move(sum); }
  // What an all_reduce takes so, in nanoseconds: of as much as crosses the host at a time, 4 MiB at most. All ranks at
  // the same time; blocks.
  int64_t measure(Nanoseconds timeout);
  // Enqueues the first two stages of a call.
  std::shared_ptr<DeviceTurns> begin(const engine::Request& request,
                                     const std::shared_ptr<DeviceCopies>& copies,
                                     std::shared_ptr<void> keepAlive);
  // The first call of each group of NCCL, which connects it; on the thread on which groups are made, as no other may
  // ask the store meanwhile. All ranks at the same time; blocks.
  void connect();
  void abort();
  void shutdown();
  // Instead, when nobody is to wait for what is enqueued.
  void abandon();

 private:
  class Turns;
  friend class Turns;
  // A call has failed on this rank: others wait for it.
  void fail(const Error& error);
  // What the parent has failed of: it names ranks as the user does, whoever of the three groups has found the trouble.
  std::optional<Error> failure() const { return engine_->failureOf(*parent_); }
  // Goes on with the oldest calls, as far as their rails have ended, on one thread at a time.
  void advanceLine();

  const std::shared_ptr<engine::Engine> engine_;
  const std::shared_ptr<engine::Group> parent_;
  const c10::Device device_;
  const Groups groups_;
  std::shared_ptr<RailSum> sum_;  // calls have a share
  std::mutex mutex_;
  std::deque<std::shared_ptr<Turns>> line_;  // guarded by mutex_
  bool busy_ = false;                        // some thread is in advanceLine(); the same
  bool again_ = false;                       // and is to look once more; the same
};

}  // namespace smddp::process_group::device
