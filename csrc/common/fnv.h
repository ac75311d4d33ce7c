// FNV-1a, a hash of bytes. It finds mistakes, not attacks; where those matter there is sha256.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace smddp {

class Fnv1a {
 public:
  // Adds the next bytes.
  Fnv1a& add(std::span<const std::byte> bytes) {
    for (const std::byte b : bytes) {
      digest_ = (digest_ ^ std::to_integer<uint64_t>(b)) * 0x100000001b3;
    }
    return *this;
  }
  // The hash of all bytes so far.
  uint64_t digest() const { return digest_; }

 private:
  uint64_t digest_ = 0xcbf29ce484222325;
};

}  // namespace smddp
