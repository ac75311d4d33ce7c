// The memory of ranks that share one GPU: this rank's workspace, and the memory of the other ranks, mapped into this
// process.
//
// The ranks exchange an Introduction when the group begins, and a Descriptor for each call. Memory of another process
// is opened when a descriptor first names it, and stays open, since opening is slow. A name has the number of the
// allocation, which is never used twice. So memory that its owner has freed is recognised, and closed.
//
// Threads: one at a time. The destructor frees the workspace. No other rank may be reading it then, so after an error
// the owner keeps the object for good.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cuda/device_table.h"
#include "cuda/share.h"

namespace smddp::cuda {

// A text that can be exchanged as plain data. Long texts are cut.
class ShortText {
 public:
  ShortText() = default;
  explicit ShortText(const std::string& text) {
    text.copy(bytes_, sizeof bytes_);
    length_ = static_cast<uint32_t>(std::min(text.size(), sizeof bytes_));
  }
  std::string string() const { return {bytes_, std::min<size_t>(length_, sizeof bytes_)}; }
  bool empty() const { return length_ == 0; }

 private:
  uint32_t length_ = 0;
  char bytes_[252] = {};
};

// A rank sends this to the others before the first call.
struct Introduction {
  uint64_t process = 0;  // a random number: containers may have the same pid
  MemoryName workspace;
  uint64_t workspaceBytes = 0;
  ShortText refusal;  // why this rank cannot share its GPU's memory; empty: it can
};
// The first refusal; empty where no rank refuses.
std::string refusalOf(std::span<const Introduction> all);

// A rank describes a call to the others by this. The descriptors of all ranks must agree in all but the buffers; sender
// and receiver of a block must agree on its size.
struct Descriptor {
  uint64_t number = 0;  // of the group's calls, from 1
  int64_t part = 0;     // the last that the GPU has finished on this rank, from 1; 0: none yet
  Operation operation = Operation::AllReduce;
  DataType type = DataType::uint8;
  ReduceOp op = ReduceOp::SUM;
  uint8_t canShare = 0;  // 1: the buffers can be opened by others
  int32_t root = 0;
  double factor = 1.0;
  uint64_t bytes = 0;
  MemoryName input, output;  // base 0: there is none
  Splits splits;             // AllToAll
};

class OpenedMemory;

class SharedGpu {
 public:
  SharedGpu(const DeviceTable& table, int device, int me, int size, int64_t workspaceBytes);
  ~SharedGpu();
  SharedGpu(const SharedGpu&) = delete;
  SharedGpu& operator=(const SharedGpu&) = delete;

  // Makes the workspace. An error becomes the refusal in the introduction, so that all ranks know it.
  Introduction introduce();
  // Opens the workspaces of the others, if no rank refuses. Returns why that cannot be done, or an empty string.
  std::string connect(std::span<const Introduction> all);

  // Describes the next call of this rank.
  Descriptor describe(const Call& call, const Buffers& mine);
  // The buffers of all ranks. Opens those of other ranks.
  std::vector<Buffers> open(std::span<const Descriptor> all, const Buffers& mine);
  const std::vector<std::byte*>& workspaces() const { return workspaces_; }
  uint64_t half() const { return half_; }
  void run(const std::vector<Job>& jobs, void* stream);

  const DeviceTable& table() const { return table_; }
  int me() const { return me_; }
  int size() const { return size_; }

 private:
  std::byte* addressOf(int rank, const MemoryName& name);

  const DeviceTable& table_;
  const int device_, me_, size_;
  const uint64_t half_;
  void* workspace_ = nullptr;
  std::vector<std::byte*> workspaces_;  // by rank
  std::vector<uint64_t> processes_;     // by rank
  // By rank and address in that rank's process; shared with other groups of this process.
  std::map<std::pair<int, uint64_t>, std::shared_ptr<OpenedMemory>> opened_;
  uint64_t calls_ = 0;
};

// Where the descriptors of two ranks differ although they must agree; empty where all agree. The same on all ranks.
std::string differenceOf(std::span<const Descriptor> all);

}  // namespace smddp::cuda
