#include "common/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace smddp {
namespace {

// The fractional parts of the cube roots of the first 64 primes.
constexpr std::array<uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t readBigEndian(const std::byte* from) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value = value << 8 | std::to_integer<uint32_t>(from[i]);
  return value;
}

template <typename T>
void writeBigEndian(std::byte* to, T value) {
  for (size_t i = 0; i < sizeof value; ++i) {
    to[i] = static_cast<std::byte>(value >> 8 * (sizeof value - 1 - i));
  }
}

}  // namespace

Sha256& Sha256::add(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const size_t filled = length_ % kBlockBytes;
    const auto piece = bytes.first(std::min(bytes.size(), kBlockBytes - filled));
    std::copy(piece.begin(), piece.end(), block_.begin() + static_cast<std::ptrdiff_t>(filled));
    length_ += piece.size();
    if (length_ % kBlockBytes == 0) digestBlock(block_.data());
    bytes = bytes.subspan(piece.size());
  }
  return *this;
}

Digest Sha256::finish() {
  const uint64_t bits = length_ * 8;
  // The padding: a one bit, zeros up to eight bytes before the end of a block, and the length in bits.
  std::array<std::byte, kBlockBytes + 8> padding{std::byte{0x80}};
  const size_t filled = length_ % kBlockBytes;
  const size_t zeros = (filled < 56 ? 56 : 120) - filled;
  writeBigEndian(padding.data() + zeros, bits);
  add(std::span(padding).first(zeros + 8));
  Digest digest;
  for (size_t i = 0; i < state_.size(); ++i) writeBigEndian(digest.data() + 4 * i, state_[i]);
  return digest;
}

void Sha256::digestBlock(const std::byte* block) {
  std::array<uint32_t, 64> w;
  for (size_t i = 0; i < 16; ++i) w[i] = readBigEndian(block + 4 * i);
  for (size_t i = 16; i < 64; ++i) {
    const uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + w[i - 7] +
           (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t first = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                           ((e & f) ^ (~e & g)) + kRound[i] + w[i];
    const uint32_t second =
        (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + first;
    d = c;
    c = b;
    b = a;
    a = first + second;
  }
  const std::array<uint32_t, 8> mixed = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < state_.size(); ++i) state_[i] += mixed[i];
}

Digest hmacSha256(std::span<const std::byte> key, std::span<const std::byte> message) {
  std::array<std::byte, 64> block{};
  if (key.size() > block.size()) {
    const Digest shorter = Sha256().add(key).finish();
    std::copy(shorter.begin(), shorter.end(), block.begin());
  } else {
    std::copy(key.begin(), key.end(), block.begin());
  }
  const auto padded = [&](unsigned with) {
    std::array<std::byte, 64> result;
    std::transform(block.begin(), block.end(), result.begin(),
                   [&](std::byte b) { return b ^ std::byte(with); });
    return result;
  };
  const Digest inner = Sha256().add(padded(0x36)).add(message).finish();
  return Sha256().add(padded(0x5c)).add(inner).finish();
}

bool sameDigest(const Digest& a, const Digest& b) {
  std::byte difference{0};
  for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == std::byte{0};
}

}  // namespace smddp
