// The call that a rank makes: as 16 bytes, which arrivals and messages carry, and as a text for errors.
#pragma once

#include <bit>
#include <cstring>
#include <span>
#include <string>

#include "collectives/collective.h"
#include "common/types.h"
#include "engine/calls/request.h"
#include "transport/wire.h"

namespace smddp::engine::calls {

// With PREMUL_SUM, this many low bits of CallFingerprint::bytes are the length, and the others are the root.
inline constexpr int kLengthBits = 42;

inline transport::CallFingerprint fingerprint(const Request& request) {
  transport::CallFingerprint call{};
  call.collective = static_cast<uint8_t>(request.collective);
  call.dtype = static_cast<uint8_t>(request.type);
  call.op = static_cast<uint8_t>(request.op);
  call.flags = static_cast<uint8_t>(request.partOf);
  call.root = request.root;
  call.bytes = static_cast<uint64_t>(request.bytes);
  // All ranks must scale by the same factor, so it belongs to the call. `root` holds it, and the root moves to bits
  // 42–63 of `bytes`: a vector has less than 2^42 bytes (4 TiB), and a rank is less than 2^22. Example: 12 bytes to
  // root 3 are 12 + 3 · 2^42.
  if (request.op == ReduceOp::PREMUL_SUM) {
    call.root = std::bit_cast<int32_t>(static_cast<float>(request.factor));
    call.bytes |= static_cast<uint64_t>(request.root) << kLengthBits;
  }
  return call;
}

inline bool sameCall(const transport::CallFingerprint& a, const transport::CallFingerprint& b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

// "allreduce of 6553600 float32 (25.0 MiB) with SUM", "broadcast of 12 B from rank 0"
// `jobRanks` has the numbers that texts give to ranks; empty: their own.
std::string describe(const transport::CallFingerprint& call, std::span<const Rank> jobRanks = {});
// "with tag 3"; "within a collective" for negative tags, which only smddp's own messages have.
std::string describeTag(int32_t tag);

}  // namespace smddp::engine::calls
