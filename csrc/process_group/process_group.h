// c10d::Backend "smddp": checks a call, describes it as a Request, submits it, returns a Work.
//
// Threads: any; calls of one group must come in the same order on all ranks, as everywhere in c10d. Those that
// callbacks of futures make have an order of their own (call_order.h). Ends with shutdown() (destroy_process_group),
// which waits for what is in flight, or with the destructor, which does not wait for other ranks. Both are idempotent.
// Errors: a call that makes no sense throws before anything moves (ValueError, TypeError, NotImplementedError); the
// Work has all other errors.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "engine/meeting_point.h"
#include "process_group/call_order.h"
#include "process_group/device_calls.h"
#include "process_group/residuals.h"
#include "process_group/work.h"

namespace smddp::process_group {

// engine::sharedEngine(), whose errors are thrown as torch's.
std::shared_ptr<engine::Engine> sharedEngine();

// Tells the other ranks of a group why this one does not come; `jobRank` is its number in the job. Throws nothing.
void reportTrouble(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, int rank,
                   int jobRank, const Error& error);

class ProcessGroup : public c10d::Backend {
 public:
  // A group whose ranks meet through the store is made from these.
  struct Creation {
    c10::intrusive_ptr<c10d::Store> store;
    int rank;
    int size;
    std::chrono::milliseconds timeout;
    std::string name;
    engine::groups::GroupOptions options;
    std::vector<int> ranksOfWorld;  // its ranks in the default group; empty for the default group
    bool waitsForMembers = false;   // has none before the first reconfigure()
  };
  // Meets the other ranks, unless it waits for members; blocks until all are there or the timeout is over. `devices`
  // serves tensors on a device.
  ProcessGroup(const Creation& creation, std::unique_ptr<DeviceCalls> devices);
  // Takes a group of the engine that exists already.
  ProcessGroup(std::shared_ptr<engine::groups::Group> group, std::chrono::milliseconds timeout,
               std::unique_ptr<DeviceCalls> devices);
  ~ProcessGroup() override;

  const std::string getBackendName() const override { return "smddp"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;
  c10d::ErrorType getError() override;
  void abort() override { abortBecause({}); }
  // As abort(); the errors of all ranks end with the reason, if there is one.
  virtual void abortBecause(const std::string& reason);
  void shutdown() override;

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs,
                                                std::vector<std::vector<at::Tensor>>& inputs,
                                                const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int destination,
                                      int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int source,
                                      int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;

  c10::intrusive_ptr<c10d::Work> allreduce_sparse(std::vector<at::Tensor>& tensors,
                                                  const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors,
                                        const c10d::ReduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(
      std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs,
                                        std::vector<at::Tensor>& inputs,
                                        const c10d::GatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputs,
                                         std::vector<std::vector<at::Tensor>>& inputs,
                                         const c10d::ScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& outputSplits,
                                               std::vector<int64_t>& inputSplits,
                                               const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& options) override;
  // Every rank tells rank 0 that it has come, and rank 0 answers. If ranks do not come, the group fails on all ranks
  // with an error that names them. Blocks. `waitAllRanks`: the error names all missing ranks, instead of the first.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool waitAllRanks) override;

  // The calls that this thread makes between these two run at the same time. The Work that endCoalescing() returns is
  // for all of them.
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;

  // A group of some of our ranks. It needs no store, since its members know one another. Null on ranks that are not in
  // it.
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& options) override;

  // DDP's reducer and FSDP2 ask these for the memory of their buckets.
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

#ifdef C10D_BACKEND_HAS_RECONFIGURE
  // The members may change (docs/faults.md): this object gets another rank and size, and starts at call 0. What is in
  // flight ends with Aborted. If it fails, the members stay as they are. No call of the group may be made meanwhile.
  bool supportsReconfigure() const override { return true; }
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  c10::intrusive_ptr<c10d::Work> reconfigure(const c10d::ReconfigureOptions& options) override;
#endif

#ifdef C10D_BACKEND_HAS_HOOKS
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t id) override { hooks_->abort.remove(id); }
#endif
#if SMDDP_TORCH_VERSION_MINOR >= 15
  bool supportsAbortHooks() const override { return true; }
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t id) override { hooks_->completion.remove(id); }
#endif

  // How often each algorithm ran so far, and what it moved, by name: "allreduce/direct".
  std::map<std::string, engine::plans::AlgorithmUse> statistics();
  // One line: the layout of the group, and the network that it uses between nodes.
  std::string describe();

 protected:
  // Throws when the group has been destroyed, or has no members yet.
  std::shared_ptr<engine::groups::Group> group() const;
  // In which a collective that this thread makes now has its place. Throws as group().
  std::shared_ptr<CallOrder> order();
  // Ends the group without waiting for anybody: what is in flight ends with Aborted.
  void leave();
  // Whether shutdown() has been called, or the group is being destroyed.
  bool isEnding() const { return isEnding_.load(); }
  // A call's time-out, or that of the group where the call has none.
  Nanoseconds effectiveTimeout(std::chrono::milliseconds timeout) const;
  const std::shared_ptr<engine::Engine>& engine() const { return engine_; }
  DeviceCalls& devices() { return *devices_; }
  // The engine's group for split(), and its time-out; null on ranks that are not in it.
  std::pair<std::shared_ptr<engine::groups::Group>, std::chrono::milliseconds> splitEngineGroup(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& options);
  // This group was split off `parent`, and has these ranks of it, who can also meet in `store`.
  void becomePartOf(const ProcessGroup& parent, const std::vector<int>& ranks,
                    const c10::intrusive_ptr<c10d::Store>& store);

 private:
  friend class Mailbox;  // sends messages without a Work

  // Its members, and the orders of their calls. reconfigure() makes another one.
  struct Members {
    Members(const std::shared_ptr<engine::Engine>& engine,
            std::shared_ptr<engine::groups::Group> of)
        : group(std::move(of)), calls(engine, group) {}
    const std::shared_ptr<engine::groups::Group> group;
    CallOrders calls;
  };
  // Null: the group has no members yet.
  std::shared_ptr<Members> members() const { return members_.load(std::memory_order_acquire); }
  // Those of all orders of its calls, the script's first; none without members.
  std::vector<std::shared_ptr<engine::groups::Group>> engineGroups() const;
  // Throws if there are none, or if the group has been destroyed.
  std::shared_ptr<Members> requireMembers() const;
  void requireOpen() const;
  // From now on calls go to this group of the engine.
  void setMembers(std::shared_ptr<engine::groups::Group> group);
  // Abort hooks run when these members' group breaks.
  void watchForBreak(const Members& members);

  engine::calls::Request newRequest(collectives::Collective collective,
                                    std::chrono::milliseconds timeout, bool asyncOp) const;
  // Adds what a call with error feedback needs; `inputs` are the tensors that the request reads.
  void addResidual(engine::calls::Request& request, at::TensorList inputs);
  // Records the call for torch.profiler if that is active, and submits it.
  c10::intrusive_ptr<Work> submit(Work::Call call, std::span<engine::calls::Request> requests,
                                  std::span<engine::calls::Message> messages);
  c10::intrusive_ptr<Work> submit(Work::Call call, std::span<engine::calls::Request> requests) {
    return submit(std::move(call), requests, {});
  }
  c10::intrusive_ptr<Work> submit(Work::Call call, engine::calls::Request request) {
    return submit(std::move(call), {&request, 1}, {});
  }
  c10::intrusive_ptr<Work> submit(Work::Call call, engine::calls::Message message) {
    return submit(std::move(call), {}, {&message, 1});
  }
  // Hands the operations of a call to the engine. If the call is on a device, or calls on a device wait, hands them to
  // devices() instead.
  c10::intrusive_ptr<Work> submitUnrecorded(Work::Call call,
                                            std::span<engine::calls::Request> requests,
                                            std::span<engine::calls::Message> messages);
  // The requests of all-gathers and reduce-scatters, which c10d has in several forms.
  engine::calls::Request gatherRequest(const char* name, const at::Tensor& output,
                                       const at::Tensor& input, Staging& staging,
                                       const c10d::AllgatherOptions& options) const;
  engine::calls::Request gatherRequest(at::TensorList outputs, const at::Tensor& input,
                                       Staging& staging,
                                       const c10d::AllgatherOptions& options) const;
  engine::calls::Request scatterRequest(const char* name, const at::Tensor& output,
                                        const at::Tensor& input, Staging& staging,
                                        const c10d::ReduceScatterOptions& options);
  engine::calls::Message newMessage(bool send, Rank rank, int32_t tag, engine::calls::Pieces buffer,
                                    std::chrono::milliseconds timeout = c10d::kUnsetTimeout) const;
  // An all-to-all of blocks, one for each rank, of which only sender and receiver know the size.
  c10::intrusive_ptr<Work> exchange(Work::Call call, engine::calls::Pieces sent,
                                    engine::calls::Pieces received,
                                    const c10d::AllToAllOptions& options);
  // The call ends with operations that the engine does not wait for when the group ends: receives, because a user's may
  // wait for ever, and what begins later. So this group waits for them.
  void noteOpen(const Work& work);
  // If this thread is between startCoalescing() and endCoalescing(), the call is one of theirs.
  void noteCoalesced(const c10::intrusive_ptr<Work>& work);

  const std::shared_ptr<engine::Engine> engine_;
  std::atomic<std::shared_ptr<Members>> members_;
  c10::intrusive_ptr<c10d::Store>
      store_;                          // in which the ranks meet for further orders; may be null
  std::atomic<bool> isEnding_{false};  // takes no calls; those in flight may still end
  std::atomic<bool> hasLeft_{false};
  std::atomic<int64_t> timeoutMs_;
  std::vector<int> globalRanks_;  // for the profiler
  const std::unique_ptr<DeviceCalls> devices_;
  Residuals residuals_;
  const std::shared_ptr<Hooks> hooks_ = std::make_shared<Hooks>();
  std::atomic<bool> hasAbortHooks_{false};  // or has had some
  bool outlivesLosses_ = false;  // ElasticMembers says when it has failed; guarded by meetingMutex_
  const engine::groups::GroupSpec spec_;  // as the group began
  const bool isDefault_ = false;
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  friend class ElasticMembers;
  // Both with meetingMutex_ held.
  engine::MeetingPoint& meetingPoint() const;
  void changeMembers(const std::vector<bootstrap::Handle>& handles, int64_t uuid,
                     Nanoseconds timeout);
  mutable std::mutex meetingMutex_;                           // held by reconfigure()
  mutable std::optional<engine::MeetingPoint> meetingPoint_;  // guarded by meetingMutex_
  uint32_t changes_ = 0;                                      // guarded by meetingMutex_
#endif
  std::mutex partsMutex_;
  std::vector<engine::calls::CompletionPtr> openParts_;  // guarded by partsMutex_; see noteOpen()
  std::mutex splitMutex_;                                // not held while split() waits
  // Guarded by splitMutex_. The store of the last split whose lists of members were compared.
  c10::weak_intrusive_ptr<c10d::Store> splitStore_{c10::intrusive_ptr<c10d::Store>()};
};

}  // namespace smddp::process_group
