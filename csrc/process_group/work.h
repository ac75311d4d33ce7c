// c10d::Work over the engine's Completion.
#pragma once

#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/calls/completion.h"
#include "engine/engine.h"
#include "process_group/call_memory.h"
#include "process_group/call_order.h"
#include "process_group/hooks.h"
#include "process_group/staging.h"

namespace smddp::process_group {

// One call of a collective or of send/recv. Some calls are several operations, as coalesced ones are.
//
// Threads: any. wait() runs the engine itself where it can; its caller has released the GIL. Outputs that were staged
// are copied before wait() returns and before the future completes. A call on a device has ended when the copies back
// are enqueued: wait() and synchronize() block the host until then, and make the current stream wait for the copies.
// With a future, each stream that uses its value waits for the copies. The future's callbacks run on a progress thread,
// after those of the calls before it (call_order.h), or in wait() of this object. When wait() returns, the future is
// completed. Holds the memory of the call (call_memory.h), the completions and the engine, so it may outlive its
// process group. Dropping it does not end the operation. After an error, every wait() throws the same one.
class Work final : public c10d::Work {
 public:
  // Most calls are one operation.
  using Completions = c10::SmallVector<engine::calls::CompletionPtr, 1>;
  struct Call {
    Call() = default;
    Call(c10d::OpType type, const char* title, std::vector<at::Tensor> inputs,
         std::vector<std::vector<at::Tensor>> outputs)
        : type(type),
          title(title),
          memory(std::make_shared<CallMemory>(std::move(inputs), std::move(outputs))),
          staging(memory) {}
    c10d::OpType type = c10d::OpType::UNKNOWN;
    const char* title = "";  // of the profiler's range: "smddp:all_reduce"
    // Counted by the process group; 0: not numbered. The engine's numbers (Completion::sequence()) count collectives,
    // of which a call can have several.
    uint64_t sequence = 0;
    CallMemoryPtr memory;
    // The sizes of blocks of an all-to-all that has several, as the caller gave them; for the profiler.
    std::vector<int64_t> inputSplits, outputSplits;
    // The hooks of the group; null for calls that torch does not see.
    std::shared_ptr<const Hooks> hooks;
    // Copies of tensors that cannot be used where they lie.
    Staging staging;
    // In which it was made; null for messages, which have no order.
    std::shared_ptr<CallOrder> order;
    // The calls between startCoalescing() and endCoalescing(), of the Work that the latter returns.
    std::vector<c10::intrusive_ptr<Work>> parts;
  };
  Work(int rank, std::shared_ptr<engine::Engine> engine,
       std::shared_ptr<engine::groups::Group> group, Call call);
  // Sets the operations of this call. Once, before anybody else sees the object.
  void setOperations(Completions completions);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  // kNoTimeout: until the operation's own deadline. If `timeout` passes, the group fails with CollectiveTimeoutError on
  // all ranks, as at that deadline, since the other ranks wait for this one.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return call_.sequence; }
  // Milliseconds. Known of calls that have ended, and only if the group had a completion hook when they began.
  float getDuration() const override;
#if SMDDP_TORCH_VERSION_MINOR >= 15
  uint64_t getCompletionKey() const override { return completionKey(); }
#endif
  // No other Work of this process has it.
  uint64_t completionKey() const { return completionKey_; }

  // Null for messages.
  const std::shared_ptr<CallOrder>& order() const { return call_.order; }
  // Whether all operations have ended.
  bool hasEnded() const;
  // Runs `action` once they have, on the thread that sees the last one end; at once if they have.
  void whenEnded(std::function<void()> action);
  // Completes the future, after the last operation of the call. The first thread that comes does it, and runs the
  // future's callbacks.
  void finishFuture();
  // The completions of the call's operations.
  const Completions& completions() const { return completions_; }
  // Called when only weak references are left, which must not keep the tensors alive.
  void release_resources() override { call_ = Call(); }

 private:
  // The parts of this call, itself included, that are on a device.
  std::vector<DeviceCall*> deviceCalls() const;
  // After the operations have ended, the first thread that comes copies what was staged; the others wait for it.
  void settle();
  const Error* firstError() const;
  // Gives the hooks to their thread, which tells them that the call has ended, if it has without an error.
  void report();
  c10::intrusive_ptr<c10::ivalue::Future> futureIfAny() const;
  at::IValue futureValue() const;

  const std::shared_ptr<engine::Engine> engine_;
  const std::shared_ptr<engine::groups::Group> group_;
  const uint64_t completionKey_;
  Call call_;                // constant as long as anybody holds the object
  const Nanoseconds start_;  // 0: nobody wants to know how long it takes
  Completions completions_;
  std::atomic<float> milliseconds_{-1};  // see getDuration()
  std::once_flag settled_;
  std::optional<Error> copyError_;  // written within settled_; read when copyFailed_
  std::atomic<bool> copyFailed_{false};
  std::atomic<bool> isFutureTaken_{false};  // by the thread that completes it
  std::atomic<bool> hasWaited_{false};      // wait() has returned
  mutable std::mutex futureMutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // guarded by futureMutex_; made when asked for
};

}  // namespace smddp::process_group
