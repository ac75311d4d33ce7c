// c10d::Work over the engine's Completion.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <mutex>
#include <vector>

#include "engine/completion.h"
#include "engine/engine.h"

namespace smddp::process_group {

// One call of a collective or of send/recv; several operations for coalesced ones.
//
// Threads: any. wait() runs the engine itself where it can, with the GIL released by the caller.
// Owns shares of the tensors, the completions and the engine, so it may outlive its process group; dropping
// it does not end the operation. After an error, every wait() throws the same one.
class Work final : public c10d::Work {
 public:
  struct Call {
    c10d::OpType type = c10d::OpType::UNKNOWN;
    const char* title = "";  // of the profiler's range: "smddp:all_reduce"
    uint64_t sequence = 0;
    std::vector<at::Tensor> inputs;
    // What result() and the future hold: one list, or one per input.
    std::vector<std::vector<at::Tensor>> outputs;
  };
  Work(int rank, std::shared_ptr<engine::Engine> engine, std::shared_ptr<engine::Group> group,
       Call call);
  // The operations of this call. Once, before anybody else sees the object.
  void start(std::vector<engine::CompletionPtr> completions);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  // kNoTimeout: until the operation's own deadline. A timeout that passes breaks the group as that deadline
  // does, with CollectiveTimeoutError on all ranks: the others must not be left waiting.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return call_.sequence; }

 private:
  bool allDone() const;
  const Error* firstError() const;
  at::IValue futureValue() const;
  // The last operation of the call has ended.
  void finishFuture();

  const std::shared_ptr<engine::Engine> engine_;
  const std::shared_ptr<engine::Group> group_;
  const Call call_;
  std::vector<engine::CompletionPtr> completions_;
  std::mutex futureMutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // guarded by futureMutex_; made when asked for
};

}  // namespace smddp::process_group
