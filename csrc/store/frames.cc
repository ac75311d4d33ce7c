#include "store/frames.h"

#include <cstring>

#include "bootstrap/blob.h"
#include "common/error.h"

namespace smddp::store {
namespace {

using bootstrap::BlobError;
using bootstrap::BlobReader;
using bootstrap::BlobWriter;

// A frame begins with a number whose place is for its length.
Bytes withLength(Bytes frame) {
  const size_t rest = frame.size() - kLengthBytes;
  if (rest > kMaxFrame) {
    raise(ErrorKind::Usage, "the store takes at most {} bytes at a time, not {}", kMaxFrame, rest);
  }
  const auto length = static_cast<uint32_t>(rest);
  std::memcpy(frame.data(), &length, sizeof length);
  return frame;
}

}  // namespace

Bytes serialise(const Request& request) {
  BlobWriter frame;
  frame.number(uint32_t{0});
  frame.number(static_cast<uint8_t>(request.kind));
  frame.number(static_cast<uint16_t>(request.keys.size()));
  for (const std::string& key : request.keys) frame.text("a key", key, UINT16_MAX);
  frame.raw(request.value);
  return withLength(frame.take());
}

std::optional<Request> parseRequest(std::span<const std::byte> rest) {
  Request request;
  try {
    BlobReader reader(rest);
    const auto kind = reader.number<uint8_t>("kind");
    const auto count = reader.number<uint16_t>("number of keys");
    if (kind > static_cast<uint8_t>(RequestKind::Check) || count == 0) return std::nullopt;
    request.kind = static_cast<RequestKind>(kind);
    for (uint16_t i = 0; i < count; ++i) request.keys.push_back(reader.text("key", UINT16_MAX));
    rest = reader.rest();
  } catch (const BlobError&) {
    return std::nullopt;
  }
  request.value.assign(rest.begin(), rest.end());
  const bool hasOneKey = request.keys.size() == 1;
  switch (request.kind) {
    case RequestKind::Set: return hasOneKey ? std::optional(request) : std::nullopt;
    case RequestKind::Add:
      return hasOneKey && rest.size() == sizeof(int64_t) ? std::optional(request) : std::nullopt;
    case RequestKind::Get:
    case RequestKind::Check: return rest.empty() ? std::optional(request) : std::nullopt;
  }
  return std::nullopt;
}

Bytes replyWith(bool yes, std::span<const std::byte> rest) {
  BlobWriter frame;
  frame.number(uint32_t{0});
  frame.number(static_cast<uint8_t>(yes));
  frame.raw(rest);
  return withLength(frame.take());
}

void appendValue(BlobWriter& to, std::span<const std::byte> value) {
  to.number(static_cast<uint32_t>(value.size()));
  to.raw(value);
}

std::optional<std::vector<Bytes>> parseValues(std::span<const std::byte> rest, size_t count) {
  std::vector<Bytes> values;
  try {
    BlobReader reader(rest);
    for (size_t i = 0; i < count; ++i) {
      const auto value = reader.take("value", reader.number<uint32_t>("length"));
      values.emplace_back(value.begin(), value.end());
    }
    reader.end();
  } catch (const BlobError&) {
    return std::nullopt;
  }
  return values;
}

uint32_t lengthOf(std::span<const std::byte> frame) {
  return BlobReader(frame).number<uint32_t>("length");
}

}  // namespace smddp::store
