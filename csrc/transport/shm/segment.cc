#include "transport/shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "common/control_groups.h"
#include "common/error.h"
#include "common/mutex.h"
#include "transport/shm/region_allocator.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace smddp::transport::shm {
namespace {

// All mappings of this process, by nonce. Never destroyed, because tensors may be freed while the process exits.
struct Registry {
  Mutex mutex;
  std::map<Nonce, std::weak_ptr<Segment>> mappings SMDDP_GUARDED_BY(mutex);

  std::shared_ptr<Segment> find(const Nonce& nonce) {
    const MutexLock lock(mutex);
    const auto it = mappings.find(nonce);
    return it == mappings.end() ? nullptr : it->second.lock();
  }

  // Returns the mapping to use. Two threads may attach the same segment at the same time; the first one's counts.
  std::shared_ptr<Segment> insert(std::shared_ptr<Segment> segment) {
    const MutexLock lock(mutex);
    auto& entry = mappings[segment->address().nonce];
    if (auto earlier = entry.lock()) return earlier;
    entry = segment;
    return segment;
  }

  void erase(const Nonce& nonce) {
    const MutexLock lock(mutex);
    const auto it = mappings.find(nonce);
    // If it is not expired, the segment was attached again after the last shared_ptr ended.
    if (it != mappings.end() && it->second.expired()) mappings.erase(it);
  }
};

Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

Nonce drawNonce() {
  Nonce nonce;
  size_t have = 0;
  while (have < nonce.size()) {
    const ssize_t got = getrandom(nonce.data() + have, nonce.size() - have, 0);
    if (got < 0 && errno != EINTR) raiseErrno(ErrorKind::Transport, "getrandom failed");
    if (got > 0) have += static_cast<size_t>(got);
  }
  return nonce;
}

bool outOfSomething(int error) {
  return error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOSPC || error == EFBIG;
}

FileDescriptor createMemfd(const char* name) {
  // Without MFD_NOEXEC_SEAL newer kernels warn, or refuse if vm.memfd_noexec=2. Older kernels do not know the flag.
  int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0 && outOfSomething(errno)) {
    raiseErrno(ErrorKind::Resource,
               "no shared memory: memfd_create failed; raise the limit of open files (ulimit -n)");
  }
  if (fd < 0) {
    raiseErrno(
        ErrorKind::Transport,
        "no shared memory: memfd_create failed; allow it in the sandbox, or give every rank its "
        "own SMDDP_NODE_ID");
  }
  return FileDescriptor(fd);
}

void setSize(int fd, size_t bytes) {
  // Beyond this limit ftruncate would raise a signal that ends the process.
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes) {
    raise(ErrorKind::Resource,
          "shared memory of {} bytes exceeds the limit on file sizes of {} bytes; raise it (ulimit "
          "-f)",
          bytes, static_cast<uint64_t>(limit.rlim_cur));
  }
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    raiseErrno(ErrorKind::Resource, "cannot make shared memory of {} bytes", bytes);
  }
}

std::byte* map(int fd, size_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) {
    raiseErrno(ErrorKind::Resource,
               "cannot map {} bytes of shared memory; raise the limit of address space (ulimit -v)",
               bytes);
  }
  return static_cast<std::byte*>(base);
}

FileDescriptor openMemoryOf(const SegmentAddress& address) {
  const std::string path = fmt::format("/proc/{}/fd/{}", address.pid, address.fd);
  // Before verify() this may be any file. To open a device must not block, nor make it our terminal.
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd >= 0) return FileDescriptor(fd);
  if (outOfSomething(errno)) {
    raiseErrno(ErrorKind::Resource, "cannot open {}; raise the limit of open files (ulimit -n)",
               path);
  }
  if (errno == EACCES || errno == EPERM) {
    raiseErrno(ErrorKind::Transport,
               "may not open {}: ranks of one node must run as the same user and must not be "
               "undumpable; otherwise give every rank its own SMDDP_NODE_ID",
               path);
  }
  raiseErrno(
      ErrorKind::Transport,
      "cannot open {}: process {} has ended, or it is in another PID namespace; in containers "
      "share the PID namespace, or give every rank its own SMDDP_NODE_ID",
      path, address.pid);
}

// Checks what a mate published against the file itself.
void verify(int fd, const SegmentAddress& address, size_t bytes) {
  struct stat status {};
  if (fstat(fd, &status) != 0) {
    raiseErrno(ErrorKind::Transport, "cannot examine the shared memory of process {}", address.pid);
  }
  const int seals = fcntl(fd, F_GET_SEALS);
  const bool sealed = seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && (seals & F_SEAL_GROW) != 0;
  if (!sealed || status.st_uid != geteuid() || static_cast<uint64_t>(status.st_size) != bytes) {
    raise(
        ErrorKind::Transport,
        "descriptor {} of process {} is not the shared memory it published ({} bytes expected, {} "
        "found); the process may have ended and its number been reused: restart the job",
        address.fd, address.pid, bytes, status.st_size);
  }
}

}  // namespace

std::shared_ptr<Segment> Segment::create(size_t bytes, const char* name) {
  SMDDP_CHECK(bytes > 0 && bytes < size_t{1} << 46, "a segment of {} bytes", bytes);
  bytes = roundUp(bytes, kPage);
  FileDescriptor fd = createMemfd(name);
  setSize(fd.get(), bytes + kHeaderPage);
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    raiseErrno(ErrorKind::Transport, "cannot seal shared memory");
  }
  const Nonce nonce = drawNonce();
  const SegmentAddress address{getpid(), fd.get(), bytes, nonce};
  std::byte* base = map(fd.get(), bytes + kHeaderPage);
  auto segment = std::make_shared<Segment>(Private{}, address, base, std::move(fd));
  // Back the header page before it is touched. If there is no memory, this throws; a touch would raise SIGBUS.
  if (fallocate(segment->fd_.get(), 0, 0, static_cast<off_t>(kHeaderPage)) != 0) {
    raiseErrno(ErrorKind::Resource, "no memory for {} bytes of shared memory", kHeaderPage);
  }
  std::memcpy(base, nonce.data(), nonce.size());
  return registry().insert(std::move(segment));
}

std::shared_ptr<Segment> Segment::attach(const SegmentAddress& address) {
  if (auto known = registry().find(address.nonce)) return known;
  // Check the size first: it comes from another process, and the sum below must not overflow.
  if (address.bytes == 0 || address.bytes >= uint64_t{1} << 46 || address.bytes % kPage != 0) {
    raise(ErrorKind::Transport,
          "process {} published shared memory of {} bytes, which is impossible", address.pid,
          address.bytes);
  }
  const size_t bytes = address.bytes + kHeaderPage;
  const FileDescriptor fd = openMemoryOf(address);
  verify(fd.get(), address, bytes);
  std::byte* base = map(fd.get(), bytes);
  auto segment = std::make_shared<Segment>(Private{}, address, base, FileDescriptor());
  if (std::memcmp(base, address.nonce.data(), address.nonce.size()) != 0) {
    raise(
        ErrorKind::Transport,
        "descriptor {} of process {} is another segment than the one it published; the process may "
        "have restarted: restart the job",
        address.fd, address.pid);
  }
  return registry().insert(std::move(segment));
}

Segment::Segment(Private, const SegmentAddress& address, std::byte* base, FileDescriptor fd)
    : address_(address), base_(base), fd_(std::move(fd)) {}

Segment::~Segment() {
  registry().erase(address_.nonce);
  munmap(base_, address_.bytes + kHeaderPage);
}

void Segment::requireOwner(size_t offset, size_t bytes, const char* what) const {
  // A forked child has the descriptor, too, but the memory is its parent's.
  SMDDP_CHECK(fd_ && address_.pid == getpid(), "{} by a process that does not own the segment",
              what);
  SMDDP_CHECK(offset <= size() && bytes <= size() - offset, "{} of {} bytes at {} of {}", what,
              bytes, offset, size());
}

void Segment::commit(size_t offset, size_t bytes) {
  requireOwner(offset, bytes, "commit");
  if (bytes == 0) return;
  // When memory is out, the kernel kills a process instead of refusing. So check before taking much. To look takes 0.1
  // ms, as long as to back 0.1 MiB.
  constexpr size_t kMuch = size_t{256} << 10;
  if (const auto available = bytes < kMuch ? std::nullopt : ControlGroups().availableMemory();
      available && *available < bytes) {
    raise(ErrorKind::Resource,
          "shared memory needs {} bytes, but only {} are available within the limits of this "
          "machine and of the container; raise the memory limit of the container or job, start "
          "fewer ranks, or lower SMDDP_POOL_BYTES",
          bytes, *available);
  }
  const size_t end = offset + bytes;
  // Do it in pieces. A signal makes kernels before 6.9 undo a piece, which takes some 1 ms per MiB. A timer that sends
  // one every 10 ms would let none of 16 MiB end.
  constexpr size_t kPiece = size_t{16} << 20;
  size_t most = kPiece;
  for (size_t at = offset; at < end;) {
    const size_t piece = std::min(most, end - at);
    if (fallocate(fd_.get(), 0, static_cast<off_t>(at + kHeaderPage), static_cast<off_t>(piece)) ==
        0) {
      at += piece;
      most = std::min(2 * most, kPiece);
    } else if (errno == EINTR) {
      most = std::max(most / 2, kPage);
    } else {
      raiseErrno(ErrorKind::Resource,
                 "shared memory needs {} bytes; raise the memory limit of this container or lower "
                 "SMDDP_POOL_BYTES",
                 bytes);
    }
  }
  // This saves a fault per page later. Kernels before 5.14 refuse it, which does no harm.
  const size_t first = offset / kPage * kPage;
  madvise(data() + first, roundUp(end, kPage) - first, MADV_POPULATE_WRITE);
}

void Segment::discard(size_t offset, size_t bytes) {
  requireOwner(offset, bytes, "discard");
  const size_t begin = roundUp(offset, kPage);
  const size_t end = (offset + bytes) / kPage * kPage;
  if (begin >= end) return;
  // On a memfd only a signal can make this fail; then try again.
  while (fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                   static_cast<off_t>(begin + kHeaderPage), static_cast<off_t>(end - begin)) != 0 &&
         errno == EINTR) {
  }
}

void Segment::populate() { madvise(data(), size(), MADV_POPULATE_WRITE); }

}  // namespace smddp::transport::shm
