// Reading and writing the byte strings that bootstrap sends: little-endian numbers, length-prefixed
// text.
//
// A reader trusts nothing: every field has a limit, every length is checked against what is left,
// and the first field that does not fit throws BlobError with its name. Nothing is allocated before
// that.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/error.h"

namespace smddp::bootstrap {

static_assert(std::endian::native == std::endian::little, "blobs are copied byte by byte");

// What is wrong with a blob; the reader of the blob knows whose it was and throws the Error for it.
class BlobError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

class BlobWriter {
 public:
  template <std::unsigned_integral T>
  void number(T value) {
    append(&value, sizeof(value));
  }
  void raw(std::span<const std::byte> bytes) { append(bytes.data(), bytes.size()); }
  // Length and content. A field over its limit is refused here, where its owner can still change
  // it.
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
    const size_t at = out_.size();
    out_.resize(at + count);
    if (count > 0) std::memcpy(out_.data() + at, from, count);
  }
  std::vector<std::byte> out_;
};

class BlobReader {
 public:
  // `blob` outlives the reader.
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
  // The blob must be read to its last byte: more is as wrong as less.
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
  std::span<const std::byte> take(const char* field, size_t count) {
    if (count > left_.size()) {
      throw BlobError(fmt::format("it ends in {} ({} of {} bytes)", field, left_.size(), count));
    }
    const auto result = left_.first(count);
    left_ = left_.subspan(count);
    return result;
  }
  std::span<const std::byte> left_;
};

}  // namespace smddp::bootstrap
