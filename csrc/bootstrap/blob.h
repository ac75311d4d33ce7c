// Blobs: the byte strings that bootstrap sends. They consist of little-endian numbers and length-prefixed text.
//
// A reader does not trust its input. Every field has a limit, and every length is checked against the bytes that are
// left, before anything is allocated. The first field that does not fit throws BlobError with its name.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/error.h"

namespace smddp::bootstrap {

static_assert(std::endian::native == std::endian::little, "blobs are copied byte by byte");

// Says what is wrong with a blob. The caller knows whose blob it was, and throws an Error instead.
class BlobError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

class BlobWriter {  // appends fields to a blob
 public:
  template <std::unsigned_integral T>
  void number(T value) {
    append(&value, sizeof(value));
  }
  void raw(std::span<const std::byte> bytes) { append(bytes.data(), bytes.size()); }
  // Writes length and content. Throws for a field over its limit, because here its owner can still change it.
  void bytes(const char* field, std::span<const std::byte> value, size_t limit) {
    if (value.size() > limit) {
      raise(ErrorKind::Usage, "{} has {} bytes; at most {} can be published", field, value.size(),
            limit);
    }
    number(static_cast<uint16_t>(value.size()));
    raw(value);
  }
  void text(const char* field, std::string_view value, size_t limit) {
    bytes(field, std::as_bytes(std::span(value)), limit);
  }
  std::vector<std::byte> take() { return std::move(out_); }

 private:
  void append(const void* from, size_t count) {
    const auto* bytes = static_cast<const std::byte*>(from);
    out_.insert(out_.end(), bytes, bytes + count);
  }
  std::vector<std::byte> out_;
};

class BlobReader {  // reads the fields of a blob in order
 public:
  // `blob` must outlive the reader.
  explicit BlobReader(std::span<const std::byte> blob) : left_(blob) {}

  template <std::unsigned_integral T>
  T number(const char* field) {
    T value;
    raw(field, std::as_writable_bytes(std::span(&value, 1)));
    return value;
  }
  void raw(const char* field, std::span<std::byte> to) {
    const auto from = take(field, to.size());
    if (!to.empty()) std::memcpy(to.data(), from.data(), to.size());
  }
  std::vector<std::byte> bytes(const char* field, size_t limit) {
    const auto value = lengthPrefixed(field, limit);
    return {value.begin(), value.end()};
  }
  std::string text(const char* field, size_t limit) {
    const auto value = lengthPrefixed(field, limit);
    return {reinterpret_cast<const char*>(value.data()), value.size()};
  }
  // Part of the blob.
  std::span<const std::byte> take(const char* field, size_t count) {
    if (count > left_.size()) {
      throw BlobError(fmt::format("it ends in {} ({} of {} bytes)", field, left_.size(), count));
    }
    const auto result = left_.first(count);
    left_ = left_.subspan(count);
    return result;
  }
  std::span<const std::byte> rest() { return std::exchange(left_, {}); }
  // Checks that the blob was read to its last byte.
  void end() const {
    if (!left_.empty())
      throw BlobError(fmt::format("{} bytes follow the last field", left_.size()));
  }

 private:
  std::span<const std::byte> lengthPrefixed(const char* field, size_t limit) {
    const size_t size = number<uint16_t>(field);
    if (size > limit) {
      throw BlobError(fmt::format("{} claims {} bytes, the limit is {}", field, size, limit));
    }
    return take(field, size);
  }
  std::span<const std::byte> left_;
};

}  // namespace smddp::bootstrap
