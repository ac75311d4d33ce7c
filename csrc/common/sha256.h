// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104). It is used for short messages at start-up, so simple code is enough.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace smddp {

using Digest = std::array<std::byte, 32>;

class Sha256 {
 public:
  // Adds the next piece of the message.
  Sha256& add(std::span<const std::byte> bytes);
  // Returns the digest of all pieces. The object cannot be used again.
  Digest finish();

 private:
  void digestBlock(const std::byte* block);

  static constexpr size_t kBlockBytes = 64;
  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, kBlockBytes> block_{};  // the bytes of an incomplete block
  uint64_t length_ = 0;
};

Digest hmacSha256(std::span<const std::byte> key, std::span<const std::byte> message);

// Compares in a time that does not depend on the position of a difference.
bool sameDigest(const Digest& a, const Digest& b);

}  // namespace smddp
