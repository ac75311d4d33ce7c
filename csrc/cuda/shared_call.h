// One collective among ranks that share a GPU, as a machine that is pushed on until it ends.
//
// Ranks are processes, and the kernels of different processes take turns on the GPU: one that waited for another
// process's kernel would wait for the scheduler, and for ever if that process has died. So nothing on the GPU ever
// waits for another process. The *hosts* meet instead, in exchanges of the engine, which notice who is missing; and a
// rank comes to an exchange only when the GPU has done what it had to do before:
//
//   the stream has come to the call        exchange: who calls what, where the buffers lie
//   part 1 on the GPU                      exchange
//   ...                                    (further parts of staged calls)
//   the last part on the GPU               exchange: all ranks have done theirs, the result is there
//
// Threads: one at a time; end() and isExposed() from any. Errors are exceptions; the call has to be given up then, for
// the whole group.
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

// How the hosts meet: an all-gather of descriptors.
class Exchange {
 public:
  virtual ~Exchange() = default;
  // `last`: nothing follows in this call.
  virtual void begin(const Descriptor& mine, bool last) = 0;
  virtual bool done() = 0;
  virtual std::span<const Descriptor> all() const = 0;  // when done
};

class SharedCall {
 public:
  // The stream waits already for what the buffers depend on. All have to outlive the call.
  SharedCall(SharedGpu& gpu, const Call& call, const Buffers& mine, Stream& stream,
             Exchange& exchange);

  // Goes as far as it can without waiting. True when the last exchange has begun.
  bool advance();
  // From the first exchange to the end of the last: other ranks may be reading and writing this rank's memory.
  bool isExposed() const { return exposed_; }
  // The last exchange has ended.
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
