// A fuzzer's input, read as what an enemy does one after the other.
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
  uint8_t byte() { return number<uint8_t>(); }
  // Zeros stand for what is not there any more.
  template <typename T>
  T number() {
    T value{};
    const auto bytes = take(sizeof value);
    if (!bytes.empty()) std::memcpy(&value, bytes.data(), bytes.size());
    return value;
  }
  // Fewer at the end.
  std::span<const std::byte> take(size_t count) {
    const auto result = left_.first(std::min(count, left_.size()));
    left_ = left_.subspan(result.size());
    return result;
  }
  // A byte says how many.
  std::span<const std::byte> piece() { return take(byte()); }
  std::span<const std::byte> rest() { return take(left_.size()); }

 private:
  std::span<const std::byte> left_;
};

}  // namespace smddp::fuzz
