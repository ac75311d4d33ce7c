#include "cuda/shared_gpu.h"

#include <tuple>

#include "common/error.h"
#include "common/random.h"
#include "cuda/library.h"
#include "cuda/opened_memory.h"

namespace smddp::cuda {
namespace {

// When more are open, all are closed, and are opened again when they are named. torch's allocator has few large blocks.
constexpr size_t kMostOpened = 256;

const char* nameOf(Operation operation) {
  switch (operation) {
    case Operation::AllReduce: return "all_reduce";
    case Operation::Reduce: return "reduce";
    case Operation::ReduceScatter: return "reduce_scatter";
    case Operation::AllGather: return "all_gather";
    case Operation::Gather: return "gather";
    case Operation::Broadcast: return "broadcast";
    case Operation::Scatter: return "scatter";
    case Operation::AllToAll: return "all_to_all";
  }
  return "?";
}

uint64_t numberOfProcess() {
  static const uint64_t number = randomNumber();
  return number;
}

std::string textOf(const Descriptor& call) {
  if (call.operation == Operation::AllToAll) {
    return fmt::format("call {} (all_to_all), part {}", call.number, call.part);
  }
  std::string text =
      fmt::format("call {} ({} of {} bytes, {}, {}, root {}", call.number, nameOf(call.operation),
                  call.bytes, toString(call.type), toString(call.op), call.root);
  if (call.op == ReduceOp::PREMUL_SUM) text += fmt::format(", factor {}", call.factor);
  return text + fmt::format("), part {}", call.part);
}

}  // namespace

std::string refusalOf(std::span<const Introduction> all) {
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].refusal.empty()) {
      return fmt::format("rank {}: {}", rank, all[rank].refusal.string());
    }
  }
  return "";
}

SharedGpu::SharedGpu(const DeviceTable& table, int device, int me, int size, int64_t workspaceBytes)
    : table_(table),
      device_(device),
      me_(me),
      size_(size),
      half_(static_cast<uint64_t>(workspaceBytes) / 2 / (16 * static_cast<uint64_t>(size)) * 16 *
            static_cast<uint64_t>(size)) {}

SharedGpu::~SharedGpu() {
  for (int rank = 0; rank < static_cast<int>(workspaces_.size()); ++rank) {
    std::byte* const workspace = workspaces_[static_cast<size_t>(rank)];
    if (rank != me_ && workspace != nullptr) table_.close(device_, workspace);
  }
  if (workspace_ != nullptr) table_.free(device_, workspace_);
}

Introduction SharedGpu::introduce() {
  Introduction mine;
  mine.process = numberOfProcess();
  try {
    check(table_, table_.allocate(device_, 2 * half_, &workspace_), "allocating the workspace");
    check(table_, table_.nameOf(device_, workspace_, &mine.workspace), "sharing memory of the GPU");
    mine.workspaceBytes = 2 * half_;
  } catch (const Error& error) {
    mine.refusal = ShortText(error.what());
  }
  return mine;
}

std::string SharedGpu::connect(std::span<const Introduction> all) {
  workspaces_.assign(all.size(), nullptr);
  for (const Introduction& said : all) processes_.push_back(said.process);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (static_cast<int>(rank) == me_) {
      workspaces_[rank] = static_cast<std::byte*>(workspace_);
      continue;
    }
    if (all[rank].workspaceBytes != 2 * half_) {
      return fmt::format("rank {} has a workspace of {} bytes, rank {} one of {}", rank,
                         all[rank].workspaceBytes, me_, 2 * half_);
    }
    void* base = nullptr;
    if (const int error = table_.open(device_, all[rank].workspace.handle, &base); error != 0) {
      return fmt::format("rank {} cannot open memory of rank {}: {}", me_, rank,
                         table_.textOf(error));
    }
    workspaces_[rank] = static_cast<std::byte*>(base) + all[rank].workspace.offset;
  }
  return "";
}

Descriptor SharedGpu::describe(const Call& call, const Buffers& mine) {
  Descriptor said;
  said.number = ++calls_;
  said.operation = call.operation;
  said.type = call.type;
  said.op = call.op;
  said.root = call.root;
  said.factor = call.factor;
  said.bytes = call.bytes;
  said.splits = mine.splits;
  const auto names = [&](const std::byte* data, MemoryName& name) {
    return data == nullptr || table_.nameOf(device_, data, &name) == 0;
  };
  said.canShare = names(mine.input, said.input) && names(mine.output, said.output) ? 1 : 0;
  return said;
}

std::byte* SharedGpu::addressOf(int rank, const MemoryName& name) {
  if (name.base == 0) return nullptr;
  auto& known = opened_[{rank, name.base}];
  if (known == nullptr || !known->is(name)) {
    known.reset();
    known = OpenedMemory::open(table_, device_, processes_[static_cast<size_t>(rank)], name);
  }
  return known->at(name.offset);
}

std::vector<Buffers> SharedGpu::open(std::span<const Descriptor> all, const Buffers& mine) {
  // Nobody reads them now: the GPU has finished the call before.
  if (opened_.size() + 2 * all.size() > kMostOpened) opened_.clear();
  std::vector<Buffers> buffers;
  for (int rank = 0; rank < size_; ++rank) {
    const Descriptor& said = all[static_cast<size_t>(rank)];
    if (rank == me_) {
      buffers.push_back(mine);
    } else {
      std::byte* const input = addressOf(rank, said.input);
      buffers.push_back({input, addressOf(rank, said.output), said.splits});
    }
  }
  return buffers;
}

void SharedGpu::run(const std::vector<Job>& jobs, void* stream) {
  for (const Job& job : jobs) check(table_, table_.run(device_, &job, stream), "starting a kernel");
}

std::string differenceOf(std::span<const Descriptor> all) {
  const auto agreed = [](const Descriptor& call) {
    return std::tie(call.number, call.part, call.operation, call.type, call.op, call.root,
                    call.factor, call.bytes);
  };
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (agreed(all[0]) == agreed(all[rank])) continue;
    return fmt::format("rank 0 is in {} on the GPU, rank {} in {}", textOf(all[0]), rank,
                       textOf(all[rank]));
  }
  for (size_t sender = 0; sender < all.size(); ++sender) {
    for (size_t receiver = 0; receiver < all.size(); ++receiver) {
      const uint64_t sent = all[sender].splits.to[receiver];
      const uint64_t expected = all[receiver].splits.from[sender];
      if (sent == expected) continue;
      return fmt::format("in {} on the GPU rank {} sends {} bytes to rank {}, which expects {}",
                         textOf(all[0]), sender, sent, receiver, expected);
    }
  }
  return "";
}

}  // namespace smddp::cuda
