#include "transport/fabric/reassembly.h"

#include <cstring>

#include "common/error.h"

namespace smddp::transport::fabric {
namespace {

bool samePut(const FragmentHeader& a, const FragmentHeader& b) {
  return a.immediate == b.immediate && a.totalBytes == b.totalBytes &&
         a.slot.offset == b.slot.offset && a.slot.target.key == b.slot.target.key &&
         a.slot.target.address == b.slot.target.address;
}

}  // namespace

bool Reassembly::accept(const FragmentHeader& fragment, Bytes bytes) {
  const uint64_t total = fragment.totalBytes;
  std::byte* const slot = registry_.translate(fragment.slot.target, fragment.slot.offset, total);
  if (slot == nullptr || bytes.empty() || fragment.offset > total ||
      bytes.size() > total - fragment.offset)
    raise(ErrorKind::Transport,
          "it sent {} bytes at {} of a put of {} bytes to offset {} of region {}, which is not our "
          "memory",
          bytes.size(), fragment.offset, total, fragment.slot.offset, fragment.slot.target.key);

  const std::pair key(fragment.sender, fragment.number);
  auto it = unfinished_.find(key);
  if (it != unfinished_.end() &&
      (!samePut(it->second.first, fragment) || bytes.size() > total - it->second.received))
    raise(ErrorKind::Transport, "its fragments of put {} contradict each other", fragment.number);
  if (it == unfinished_.end() && bytes.size() < total) {
    if (unfinished_.size() >= kMaxUnfinished)
      raise(ErrorKind::Transport, "it has too many puts unfinished");
    it = unfinished_.emplace(key, Unfinished{fragment}).first;
  }
  std::memcpy(slot + fragment.offset, bytes.data(), bytes.size());
  if (it == unfinished_.end()) return true;  // the put has one fragment
  it->second.received += bytes.size();
  if (it->second.received < total) return false;
  unfinished_.erase(it);
  return true;
}

}  // namespace smddp::transport::fabric
