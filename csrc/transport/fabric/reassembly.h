// Reassembles puts that arrive as fragments. Each fragment is copied to its place; the last one completes the put.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "transport/fabric/memory.h"
#include "transport/fabric/wire.h"

namespace smddp::transport::fabric {

class Reassembly {
 public:
  explicit Reassembly(const Registry& registry) : registry_(registry) {}

  // Copies the fragment into the region that it names. True if all bytes of its put have arrived.
  // Throws Transport, and writes nothing, if the fragment does not lie inside a region of ours or
  // contradicts an earlier one of the same put.
  bool accept(const FragmentHeader& fragment, Bytes bytes);

 private:
  static constexpr size_t kMaxUnfinished = 65536;

  struct Unfinished {
    FragmentHeader first;
    uint64_t received = 0;
  };
  const Registry& registry_;
  std::map<std::pair<uint64_t, uint64_t>, Unfinished> unfinished_;  // by sender and number
};

}  // namespace smddp::transport::fabric
