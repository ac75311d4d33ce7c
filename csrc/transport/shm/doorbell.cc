#include "transport/shm/doorbell.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <climits>

#include "common/error.h"
#include "common/log.h"

namespace smddp::transport::shm {
namespace {

static_assert(sizeof(std::atomic<Sleep>) == sizeof(uint32_t), "a futex is a 32-bit word");

timespec toTimespec(Nanoseconds duration) {
  return {static_cast<time_t>(duration / 1'000'000'000),
          static_cast<long>(duration % 1'000'000'000)};
}

// No FUTEX_PRIVATE_FLAG: the word is shared between processes.
void futexWait(std::atomic<Sleep>& word, Sleep value, Nanoseconds timeout) {
  const timespec limit = toTimespec(timeout);
  syscall(SYS_futex, &word, FUTEX_WAIT, static_cast<uint32_t>(value), &limit, nullptr, 0);
}

void futexWake(std::atomic<Sleep>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void writeByte(int pipe) {
  const char byte = 0;
  // If the pipe is full, its reader wakes up anyway.
  [[maybe_unused]] const auto written = write(pipe, &byte, 1);
}

void drain(int pipe) {
  std::array<char, 64> bytes;
  while (read(pipe, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size())) {
  }
}

uint64_t inodeOfPipe(int fd) {
  struct stat status {};
  return fstat(fd, &status) == 0 && S_ISFIFO(status.st_mode) ? status.st_ino : 0;
}

void warnOnce(const std::string& path) {
  static std::atomic<bool> warned{false};
  if (warned.exchange(true)) return;
  SMDDP_LOG(Warn, "transport/shm", "cannot open {} to wake its process: {}; raise ulimit -n", path,
            std::generic_category().message(errno));
}

// The mate's pipe, opened on the first use. -1 if the mate is gone or no descriptor is left.
int wakePipeOf(Mate& mate) {
  const uint64_t inode = mate.page().pipeInode.load(std::memory_order_acquire);
  Mate::Probe& probe = mate.probe();
  if (probe.wakePipe && probe.wakePipeInode == inode) return probe.wakePipe.get();
  const int32_t descriptor = mate.page().pipeDescriptor.load(std::memory_order_relaxed);
  const std::string path = fmt::format("/proc/{}/fd/{}", mate.page().pid, descriptor);
  // Open for reading, too: a pipe that has a reader raises no SIGPIPE after the mate's death.
  FileDescriptor opened(open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC));
  if (!opened && (errno == EMFILE || errno == ENFILE)) {
    // This is slow, but not fatal: a sleeper wakes up regularly to check its mates.
    warnOnce(path);
  }
  // If the mate is dead and its pid and descriptor were reused, this is another file. Never write into that.
  if (!opened || inode == 0 || inodeOfPipe(opened.get()) != inode) return -1;
  probe.wakePipe = std::move(opened);
  probe.wakePipeInode = inode;
  return probe.wakePipe.get();
}

}  // namespace

Doorbell::~Doorbell() {
  ProcessPage& page = slab_->page();
  page.sleep.store(Sleep::Awake, std::memory_order_relaxed);
  page.pipeInode.store(0, std::memory_order_release);
}

void Doorbell::prepare() {
  slab_->page().sleep.store(Sleep::OnFutex, std::memory_order_seq_cst);
  // The caller's check may use any kind of load. The fence keeps those loads after the store.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void Doorbell::cancel() { slab_->page().sleep.store(Sleep::Awake, std::memory_order_relaxed); }

void Doorbell::sleep(Nanoseconds timeout) {
  // If somebody rang after prepare(), the word differs and the kernel returns at once.
  if (timeout > 0) futexWait(slab_->page().sleep, Sleep::OnFutex, timeout);
  cancel();
}

void Doorbell::sleepOn(int descriptor, Nanoseconds timeout) {
  openPipe();
  std::atomic<Sleep>& word = slab_->page().sleep;
  Sleep expected = Sleep::OnFutex;
  // A ring before this exchange makes it fail; a ring after it writes to the pipe.
  if (timeout > 0 &&
      word.compare_exchange_strong(expected, Sleep::OnPoll, std::memory_order_seq_cst)) {
    std::array<pollfd, 2> files = {{{readEnd_.get(), POLLIN, 0}, {descriptor, POLLIN, 0}}};
    const timespec limit = toTimespec(timeout);
    ppoll(files.data(), files.size(), &limit, nullptr);
    // A byte that arrives after this stays in the pipe. The next sleep then ends early.
    if ((files[0].revents & POLLIN) != 0) drain(readEnd_.get());
  }
  cancel();
}

void Doorbell::openPipe() {
  if (readEnd_) return;
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_NONBLOCK | O_CLOEXEC) != 0) {
    raiseErrno(ErrorKind::Resource,
               "cannot make a wake-up pipe; raise the limit of open files (ulimit -n)");
  }
  readEnd_ = FileDescriptor(ends[0]);
  writeEnd_ = FileDescriptor(ends[1]);
  ProcessPage& page = slab_->page();
  page.pipeDescriptor.store(ends[1], std::memory_order_relaxed);
  page.pipeInode.store(inodeOfPipe(ends[1]), std::memory_order_release);
}

void Doorbell::ringSelf() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  std::atomic<Sleep>& word = slab_->page().sleep;
  if (word.load(std::memory_order_relaxed) == Sleep::Awake) return;
  const Sleep was = word.exchange(Sleep::Awake, std::memory_order_seq_cst);
  if (was == Sleep::OnFutex) futexWake(word);
  if (was == Sleep::OnPoll) writeByte(writeEnd_.get());
}

void Doorbell::ring(Mate& mate) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  std::atomic<Sleep>& word = mate.page().sleep;
  if (word.load(std::memory_order_relaxed) == Sleep::Awake) return;
  const Sleep was = word.exchange(Sleep::Awake, std::memory_order_seq_cst);
  if (was == Sleep::OnFutex) futexWake(word);
  if (was != Sleep::OnPoll) return;
  if (const int pipe = wakePipeOf(mate); pipe >= 0) writeByte(pipe);
}

}  // namespace smddp::transport::shm
