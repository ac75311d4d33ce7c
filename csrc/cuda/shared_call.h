// One collective among ranks that share a GPU, as a state machine.
//
// Ranks are processes, and the kernels of different processes take turns on the GPU. A kernel that waited for another
// process's kernel would hold the GPU that the other one needs, and would wait for ever if that process has died. So
// nothing on the GPU waits for another process. The *hosts* synchronise instead, in exchanges of the engine, which
// notices when a rank is lost. A rank begins an exchange when the GPU has done its part before:
//
//   the stream has come to the call        exchange: what each rank calls, where its buffers lie
//   part 1 on the GPU                      exchange
//   ...                                    (staged calls have several parts)
//   the last part on the GPU               exchange: all ranks have done their part, the result is complete
//
// Threads: one at a time; end() and isExposed() from any. Errors are exceptions; after one the group must fail.
#pragma once

#include <atomic>
#include <span>

#include "cuda/shared_gpu.h"

namespace smddp::cuda {

// The stream of a call.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual void* handle() const = 0;  // the driver's
  virtual void mark() = 0;
  virtual bool reached() const = 0;  // the last mark
};

// An exchange among the hosts: an all-gather of descriptors.
class Exchange {
 public:
  virtual ~Exchange() = default;
  // `last`: it is the last one of the call.
  virtual void begin(const Descriptor& mine, bool last) = 0;
  virtual bool done() = 0;
  virtual std::span<const Descriptor> all() const = 0;  // when done
};

class SharedCall {
 public:
  // The stream already waits for what the buffers depend on. All arguments have to outlive the call.
  SharedCall(SharedGpu& gpu, const Call& call, const Buffers& mine, Stream& stream,
             Exchange& exchange);

  // Goes on without waiting. True when the last exchange has begun.
  bool advance();
  // Whether other ranks may be reading and writing this rank's memory: from the first exchange to the end of the last.
  bool isExposed() const { return exposed_; }
  // After the last exchange has ended.
  void end() { exposed_ = false; }
  bool isDirect() const { return direct_; }

 private:
  enum class State : uint8_t { OnGpu, Meeting, Ended };
  void meet();
  void compare() const;
  void startPart();

  SharedGpu& gpu_;
  Call call_;
  const Buffers mine_;
  Stream& stream_;
  Exchange& exchange_;
  Descriptor said_;
  State state_ = State::OnGpu;
  int64_t part_ = 0;   // under way, from 1; 0: before the first
  int64_t parts_ = 1;  // known after the first exchange
  bool direct_ = false;
  std::atomic<bool> exposed_{false};
};

}  // namespace smddp::cuda
