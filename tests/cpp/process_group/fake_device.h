// What the files of the fake device share: its streams, its memory, and what tests look at.
#pragma once

#include <c10/core/Stream.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace fake_device {

constexpr int64_t kPoolStreams = 4;

// A stream: runs tasks in order, on a thread of its own, which lives as long as the process.
class Lane {
 public:
  void add(std::function<void()> task);
  void drain();
  // From capture() to endCapture() tasks do not run, but are kept for replay().
  void capture();
  void endCapture();
  bool captures();
  void replay();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::deque<std::function<void()>> graph_;
  bool captures_ = false;
  bool started_ = false;
  size_t added_ = 0, done_ = 0;
};

// Shared by all lanes. Never destroyed, since they use it until the process ends.
struct World {
  std::array<Lane, 1 + kPoolStreams> lanes;
  std::atomic<int64_t> nextPoolStream{0};
  std::mutex mutex;
  std::condition_variable changed;
  bool gated = false;
  std::map<const void*, size_t> live;                       // device memory
  std::map<const void*, std::set<c10::StreamId>> recorded;  // streams that use it beside its own
  int64_t violations = 0;
  std::atomic<bool> copiesFail{false};
  std::atomic<int> slowness{0};  // milliseconds that a copy takes
  std::atomic<bool> sharesMemory{true};
  std::atomic<bool> sharesTensors{true};     // false: only memory that the CUDA part allocates
  std::atomic<size_t> rangeBytes{SIZE_MAX};  // the most that rangeOf() describes of an allocation
  std::atomic<int64_t> jobs{0};              // in memory of other processes, or in a workspace
  std::atomic<int64_t> fetched{0};           // bytes copied to pinned memory
  std::atomic<int> captures{0};              // streams that are captured
  std::atomic<int64_t> spoilt{
      0};  // calls that would end a capture: waiting for a stream, or querying it
};
World& world();

Lane& laneOf(c10::StreamId id);
inline void* handleOf(c10::StreamId id) { return reinterpret_cast<void*>(id + 1); }
inline c10::StreamId streamOf(void* handle) { return reinterpret_cast<intptr_t>(handle) - 1; }
// Whether that is device memory. If it has been freed, that is counted.
bool expectLive(const void* data);
c10::StreamId currentStreamId();

// What a call of a stand-in for NCCL returns: as with NCCL, the call has been enqueued.
class Enqueued final : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
};

// Adds a stand-in for NCCL to the module, see recording_nccl.cc.
void bindRecordingNccl(pybind11::module_& m);
// Adds another one, see hanging_nccl.cc.
void bindHangingNccl(pybind11::module_& m);

// Device memory, in pages of its own that other processes can map. World::live has it.
void* allocateShared(size_t bytes, bool isTensor);
void freeShared(void* data);

}  // namespace fake_device
