// Requests and memory for the engine's tests.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace smddp::test {

using collectives::Collective;
using Bytes = std::span<std::byte>;

// Memory for one buffer of a call, at any offset from an aligned address, with guards on both sides. If a CommMemory is
// given, it lies there.
class Block {
 public:
  explicit Block(size_t size, size_t misalignment = 0, transport::shm::CommMemory* shared = nullptr)
      : size_(size), offset_(kGuard + misalignment), shared_(shared) {
    const size_t whole = offset_ + size + kGuard;
    if (shared_ != nullptr) {
      memory_ = static_cast<std::byte*>(shared_->allocate(whole));
    } else {
      own_.resize(whole);
      memory_ = own_.data();
    }
    std::fill_n(memory_, whole, kFill);
  }
  ~Block() {
    if (shared_ != nullptr) shared_->free(memory_);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  Bytes bytes() { return {memory_ + offset_, size_}; }
  std::vector<std::byte> copy() { return {bytes().begin(), bytes().end()}; }
  bool guardsIntact() const {
    const auto isFill = [](std::byte b) { return b == kFill; };
    return std::all_of(memory_, memory_ + offset_, isFill) &&
           std::all_of(memory_ + offset_ + size_, memory_ + offset_ + size_ + kGuard, isFill);
  }

 private:
  static constexpr size_t kGuard = 64;
  static constexpr std::byte kFill{0xA5};

  const size_t size_;
  const size_t offset_;
  transport::shm::CommMemory* const shared_;
  std::vector<std::byte> own_;
  std::byte* memory_ = nullptr;
};

template <typename T>
Bytes bytesOf(std::vector<T>& values) {
  return {reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(T)};
}

inline engine::calls::Request allReduce(Bytes data, DataType type = DataType::float32,
                                        ReduceOp op = ReduceOp::SUM, double factor = 1.0) {
  engine::calls::Request request;
  request.collective = Collective::AllReduce;
  request.type = type;
  request.op = op;
  request.factor = factor;
  request.bytes = static_cast<int64_t>(data.size());
  request.output = {data};
  return request;
}

inline engine::calls::Request broadcast(Bytes data, Rank root) {
  engine::calls::Request request;
  request.collective = Collective::Broadcast;
  request.root = root;
  request.bytes = static_cast<int64_t>(data.size());
  request.output = {data};
  return request;
}

inline engine::calls::Request allGather(Bytes mine, engine::calls::Pieces all) {
  engine::calls::Request request;
  request.collective = Collective::AllGather;
  request.bytes = static_cast<int64_t>(mine.size());
  request.input = {mine};
  request.output = std::move(all);
  return request;
}

inline engine::calls::Request reduceScatter(engine::calls::Pieces all, Bytes mine,
                                            DataType type = DataType::float32,
                                            ReduceOp op = ReduceOp::SUM, double factor = 1.0) {
  engine::calls::Request request;
  request.collective = Collective::ReduceScatter;
  request.type = type;
  request.op = op;
  request.factor = factor;
  request.bytes = static_cast<int64_t>(mine.size());
  request.input = std::move(all);
  request.output = {mine};
  return request;
}

// At the root `data` becomes the result; on other ranks it does not change.
inline engine::calls::Request reduce(Bytes data, Rank root, bool isRoot,
                                     DataType type = DataType::float32, ReduceOp op = ReduceOp::SUM,
                                     double factor = 1.0) {
  engine::calls::Request request;
  request.collective = Collective::Reduce;
  request.type = type;
  request.op = op;
  request.factor = factor;
  request.root = root;
  request.bytes = static_cast<int64_t>(data.size());
  (isRoot ? request.output : request.input) = {data};
  return request;
}

// all: the root's output; empty on other ranks.
inline engine::calls::Request gather(Bytes mine, engine::calls::Pieces all, Rank root) {
  engine::calls::Request request;
  request.collective = Collective::Gather;
  request.root = root;
  request.bytes = static_cast<int64_t>(mine.size());
  request.input = {mine};
  request.output = std::move(all);
  return request;
}

// all: the root's input; empty on other ranks.
inline engine::calls::Request scatter(engine::calls::Pieces all, Bytes mine, Rank root) {
  engine::calls::Request request;
  request.collective = Collective::Scatter;
  request.root = root;
  request.bytes = static_cast<int64_t>(mine.size());
  request.input = std::move(all);
  request.output = {mine};
  return request;
}

// bytes: the size of one block.
inline engine::calls::Request allToAll(engine::calls::Pieces input, engine::calls::Pieces output,
                                       size_t bytes) {
  engine::calls::Request request;
  request.collective = Collective::AllToAll;
  request.bytes = static_cast<int64_t>(bytes);
  request.input = std::move(input);
  request.output = std::move(output);
  return request;
}

inline engine::calls::Request barrier() {
  engine::calls::Request request;
  request.collective = Collective::Barrier;
  return request;
}

}  // namespace smddp::test
