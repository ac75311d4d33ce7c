// The call a rank made, in 16 bytes that travel with arrivals and messages, and as the text of errors.
#pragma once

#include <bit>
#include <cstring>
#include <string>

#include "collectives/collective.h"
#include "engine/request.h"
#include "transport/wire.h"

namespace smddp::engine {

inline constexpr int kLengthBits = 42;

inline transport::CallFingerprint fingerprint(const Request& request) {
  transport::CallFingerprint call{};
  call.collective = static_cast<uint8_t>(request.collective);
  call.dtype = static_cast<uint8_t>(request.type);
  call.op = static_cast<uint8_t>(request.op);
  call.flags = static_cast<uint8_t>(request.partOf);
  call.root = request.root;
  call.bytes = static_cast<uint64_t>(request.bytes);
  // Ranks that scale by different factors would get a sum that nobody asked for. Then `root` holds the factor, and the
  // root moves to bits 42–63 of `bytes`: a vector has less than 2^42 bytes (4 TiB), and a rank less than 2^22.
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
std::string describe(const transport::CallFingerprint& call);
// "with tag 3"; negative tags are of messages that calls of smddp are made of.
std::string describeTag(int32_t tag);

}  // namespace smddp::engine
