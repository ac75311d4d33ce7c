// Memory that several processes of a node map: a memfd, reached through /proc/<pid>/fd/<fd> of its
// owner.
//
// A memfd has no name in any file system, so nothing is left behind however a process ends, and the
// size of /dev/shm does not matter. It is sealed against shrinking: a mate can never be made to
// fault by the owner.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/file_descriptor.h"

namespace smddp::transport::shm {

// Drawn at random for every segment; tells a segment from whatever later reuses its pid and
// descriptor.
using Nonce = std::array<std::byte, 16>;

// Where a mate finds a segment. Trivially copyable: it travels through bootstrap and shared memory.
struct SegmentAddress {
  int32_t pid = 0;
  int32_t fd = -1;
  uint64_t bytes = 0;
  Nonce nonce{};
};

// One mapping: our own memfd, or a mate's. Attaching a segment that this process has mapped already
// returns that mapping, so ranks that are threads of one process work on the same addresses.
// Threads: create, attach and the destructor may run on any thread; the bytes are the users' to
// synchronise. Ends with the last shared_ptr; the memory itself with the last mapping on the node.
class Segment {
  struct Private {};

 public:
  // Sparse: pages cost nothing until touched or committed. `name` is seen in /proc/<pid>/maps only.
  // Throws Resource when memory or descriptors are out.
  static std::shared_ptr<Segment> create(size_t bytes, const char* name);
  // Throws Transport when this is not the segment that was published, Resource when we cannot map
  // it.
  static std::shared_ptr<Segment> attach(const SegmentAddress& address);

  Segment(Private, const SegmentAddress& address, std::byte* base, FileDescriptor fd);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Page-aligned, size() bytes, zero at first.
  std::byte* data() const { return base_ + kHeaderPage; }
  size_t size() const { return address_.bytes; }
  const SegmentAddress& address() const { return address_; }

  // Reserves backing for a range, so that touching it later cannot fail. Owner only; throws
  // Resource.
  void commit(size_t offset, size_t bytes);
  // Gives the whole pages of a range back; they read as zero from now on. Owner only.
  void discard(size_t offset, size_t bytes);
  // Fills this process's page tables for the whole segment in one call instead of a fault per page.
  void populate();

  static constexpr size_t kPage = 4096;

 private:
  // The page in front of data() holds the nonce.
  static constexpr size_t kHeaderPage = kPage;

  void requireOwner(size_t offset, size_t bytes, const char* what) const;

  SegmentAddress address_;
  std::byte* base_;
  FileDescriptor fd_;  // the owner's; an attached mapping needs none
};

}  // namespace smddp::transport::shm
