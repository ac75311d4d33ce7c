#include "store/frames.h"

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstring>

#include "common/error.h"

namespace smddp::store {
namespace {

static_assert(std::endian::native == std::endian::little, "frames are copied byte by byte");

void append(Bytes& to, std::span<const std::byte> bytes) {
  const size_t before = to.size();
  to.resize(before + bytes.size());
  std::copy(bytes.begin(), bytes.end(), to.begin() + static_cast<ptrdiff_t>(before));
}

template <std::integral T>
void append(Bytes& to, T number) {
  append(to, std::as_bytes(std::span(&number, 1)));
}

template <typename T>
std::optional<T> take(std::span<const std::byte>& from) {
  if (from.size() < sizeof(T)) return std::nullopt;
  T number;
  std::memcpy(&number, from.data(), sizeof number);
  from = from.subspan(sizeof number);
  return number;
}

std::optional<std::span<const std::byte>> take(std::span<const std::byte>& from, size_t count) {
  if (from.size() < count) return std::nullopt;
  const auto taken = from.first(count);
  from = from.subspan(count);
  return taken;
}

void writeLength(Bytes& frame) {
  const size_t rest = frame.size() - kLengthBytes;
  if (rest > kMaxFrame) {
    raise(ErrorKind::Usage, "the store takes at most {} bytes at a time, not {}", kMaxFrame, rest);
  }
  const auto length = static_cast<uint32_t>(rest);
  std::memcpy(frame.data(), &length, sizeof length);
}

}  // namespace

Bytes serialise(const Request& request) {
  Bytes frame;
  append(frame, uint32_t{0});  // the length
  append(frame, static_cast<uint8_t>(request.kind));
  append(frame, static_cast<uint16_t>(request.keys.size()));
  for (const std::string& key : request.keys) {
    if (key.size() > UINT16_MAX) raise(ErrorKind::Usage, "a key of {} bytes", key.size());
    append(frame, static_cast<uint16_t>(key.size()));
    append(frame, std::as_bytes(std::span(key)));
  }
  append(frame, request.value);
  writeLength(frame);
  return frame;
}

std::optional<Request> parseRequest(std::span<const std::byte> rest) {
  Request request;
  const auto kind = take<uint8_t>(rest);
  const auto count = take<uint16_t>(rest);
  if (!kind || *kind > static_cast<uint8_t>(RequestKind::Check) || !count || *count == 0) {
    return std::nullopt;
  }
  request.kind = static_cast<RequestKind>(*kind);
  for (uint16_t i = 0; i < *count; ++i) {
    const auto length = take<uint16_t>(rest);
    const auto key = length ? take(rest, *length) : std::nullopt;
    if (!key) return std::nullopt;
    request.keys.emplace_back(reinterpret_cast<const char*>(key->data()), key->size());
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
  Bytes frame;
  append(frame, uint32_t{0});  // the length
  append(frame, static_cast<uint8_t>(yes));
  append(frame, rest);
  writeLength(frame);
  return frame;
}

void appendValue(Bytes& to, std::span<const std::byte> value) {
  append(to, static_cast<uint32_t>(value.size()));
  append(to, value);
}

std::optional<std::vector<Bytes>> parseValues(std::span<const std::byte> rest, size_t count) {
  std::vector<Bytes> values;
  for (size_t i = 0; i < count; ++i) {
    const auto length = take<uint32_t>(rest);
    const auto value = length ? take(rest, *length) : std::nullopt;
    if (!value) return std::nullopt;
    values.emplace_back(value->begin(), value->end());
  }
  return rest.empty() ? std::optional(std::move(values)) : std::nullopt;
}

uint32_t lengthOf(std::span<const std::byte> frame) { return *take<uint32_t>(frame); }

}  // namespace smddp::store
