// A segment: memory that several processes of a node map. It is a memfd, which mates open through /proc/<pid>/fd/<fd>
// of its owner.
//
// A memfd has no name in a file system. So nothing is left behind, however a process ends, and the size of /dev/shm
// does not matter. It is sealed against shrinking, so that the owner cannot make a mate fault.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/file_descriptor.h"

namespace smddp::transport::shm {

// A random number for every segment. It tells the segment from a later one with the same pid and descriptor.
using Nonce = std::array<std::byte, 16>;

// The address of a segment for mates. Trivially copyable: it is sent through bootstrap and shared memory.
struct SegmentAddress {
  int32_t pid = 0;
  int32_t fd = -1;
  uint64_t bytes = 0;
  Nonce nonce{};
};

// One mapping: of our own memfd, or of a mate's. If this process has mapped a segment already, attach() returns that
// mapping, so ranks that are threads of one process use the same addresses.
// Threads: create, attach and the destructor may run on any thread; the users synchronise access to the bytes.
// Ends with the last shared_ptr. The memory itself ends with the last mapping on the node.
class Segment {
  struct Private {};

 public:
  // Makes a sparse segment: pages take no memory until they are touched or committed. `name` appears in
  // /proc/<pid>/maps only. Throws Resource if there is no memory or no free descriptor.
  static std::shared_ptr<Segment> create(size_t bytes, const char* name);
  // Maps a segment. Throws Transport if it is not the one that was published, Resource if it cannot be mapped.
  static std::shared_ptr<Segment> attach(const SegmentAddress& address);

  Segment(Private, const SegmentAddress& address, std::byte* base, FileDescriptor fd);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // size() bytes, page-aligned, zero at first.
  std::byte* data() const { return base_ + kHeaderPage; }
  size_t size() const { return address_.bytes; }
  const SegmentAddress& address() const { return address_; }

  // Backs a range with memory, so that touching it later cannot fail. Owner only; throws Resource.
  void commit(size_t offset, size_t bytes);
  // Gives the whole pages of a range back to the system; then they read as zero. Owner only.
  void discard(size_t offset, size_t bytes);
  // Fills the page tables of this process for the whole segment in one call, instead of one fault per page.
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
