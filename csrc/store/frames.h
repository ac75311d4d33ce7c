// The messages between clients of the store and its server.
//
//   request   u32 length of the rest, u8 kind, u16 number of keys, the keys (u16 length and bytes each), the value
//   reply     u32 length of the rest, u8: 1 or 0, then for Get: the values (u32 length and bytes each)
//
//   kind    keys      value            reply
//   Set     1         the new value    1
//   Add     1         int64 amount     1, and the sum, int64
//   Get     1 or more none             1 and the values, or 0 if a key is not set
//   Check   1 or more none             1 if all keys are set
//
// Numbers are little-endian. Whoever reads does not trust lengths.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bootstrap/blob.h"

namespace smddp::store {

enum class RequestKind : uint8_t { Set, Add, Get, Check };

using Bytes = std::vector<std::byte>;

inline constexpr size_t kMaxFrame = size_t{1} << 26;
inline constexpr size_t kLengthBytes = sizeof(uint32_t);

struct Request {
  RequestKind kind = RequestKind::Check;
  std::vector<std::string> keys;
  Bytes value;
};

// The bytes of a request, with the length in front.
Bytes serialise(const Request& request);
// Parses the bytes behind the length. nullopt if they are malformed.
std::optional<Request> parseRequest(std::span<const std::byte> rest);

// With the length in front. `rest` follows the answer.
Bytes replyWith(bool yes, std::span<const std::byte> rest = {});
// Appends the length and the bytes of a value.
void appendValue(bootstrap::BlobWriter& to, std::span<const std::byte> value);
// The values of a reply to Get. nullopt if it is malformed.
std::optional<std::vector<Bytes>> parseValues(std::span<const std::byte> rest, size_t count);

// The length of the rest of a frame, once its first kLengthBytes have come.
uint32_t lengthOf(std::span<const std::byte> frame);

}  // namespace smddp::store
