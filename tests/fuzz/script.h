// Reads a fuzzer's input as a sequence of actions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace smddp::fuzz {

class Script {
 public:
  Script(const uint8_t* data, size_t size) : left_(std::as_bytes(std::span(data, size))) {}

  bool done() const { return left_.empty(); }
  size_t left() const { return left_.size(); }
  uint8_t byte() { return number<uint8_t>(); }
  // After the end of the input the value is zero.
  template <typename T>
  T number() {
    T value{};
    const auto bytes = take(sizeof value);
    if (!bytes.empty()) std::memcpy(&value, bytes.data(), bytes.size());
    return value;
  }
  // Returns fewer bytes at the end of the input.
  std::span<const std::byte> take(size_t count) {
    const auto result = left_.first(std::min(count, left_.size()));
    left_ = left_.subspan(result.size());
    return result;
  }
  // The first byte is the length.
  std::span<const std::byte> piece() { return take(byte()); }
  std::span<const std::byte> rest() { return take(left_.size()); }

 private:
  std::span<const std::byte> left_;
};

}  // namespace smddp::fuzz
