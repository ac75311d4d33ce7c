#include "transport/shm/liveness.h"

#include <linux/futex.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>

#include "common/error.h"

namespace smddp::transport::shm {
namespace {

constexpr Nanoseconds kMillisecond = 1'000'000;

// The first word of a robust mutex is part of the interface between glibc and the kernel. It has the holder's thread id
// and a bit that the kernel sets when that thread dies. To read it costs a load. pthread_mutex_trylock() would write to
// the cache line.
uint32_t futexWord(const ProcessPage& page) {
  return static_cast<uint32_t>(__atomic_load_n(&page.lifeLock.__data.__lock, __ATOMIC_ACQUIRE));
}

Life publishDeath(ProcessPage& page) {
  Life expected = Life::Running;
  page.life.compare_exchange_strong(expected, Life::Died, std::memory_order_acq_rel);
  return expected == Life::Running ? Life::Died : expected;
}

// True at most once per interval. Otherwise it mostly costs an increment.
bool timeToProbe(Mate::Probe& probe, bool held) {
  if (held && ++probe.calls % 64 != 0) return false;
  const Nanoseconds now = MonotonicClock().now();
  if (now < probe.next) return false;
  probe.next = now + (held ? 1000 : 10) * kMillisecond;
  return true;
}

}  // namespace

LifeLock::LifeLock(std::shared_ptr<Slab> slab) : slab_(std::move(slab)) {
  ProcessPage& page = slab_->page();
  const int error = pthread_mutex_trylock(&page.lifeLock);
  SMDDP_CHECK(error == 0, "the life lock is held already: {}", std::strerror(error));
  page.lifeLockHeld.store(1, std::memory_order_release);
}

LifeLock::~LifeLock() {
  ProcessPage& page = slab_->page();
  // In this order: a mate must not look at the mutex after the release.
  page.lifeLockHeld.store(0, std::memory_order_release);
  pthread_mutex_unlock(&page.lifeLock);
}

Life lifeOf(Mate& mate) {
  ProcessPage& page = mate.page();
  const Life life = page.life.load(std::memory_order_acquire);
  if (life != Life::Running) return life;
  const bool held = page.lifeLockHeld.load(std::memory_order_acquire) != 0;
  if (held && (futexWord(page) & FUTEX_OWNER_DIED) != 0) return publishDeath(page);
  if (!timeToProbe(mate.probe(), held) || page.startTime == 0) return Life::Running;
  // With another start time the pid belongs to a new process, so our mate is dead.
  return startTimeOf(page.pid).value_or(page.startTime) == page.startTime ? Life::Running
                                                                          : publishDeath(page);
}

bool isStopped(const Mate& mate) {
  const int32_t pid = mate.page().pid;
  const auto stat = statOf(pid);
  return stat && (stat->stopped || isFrozen(pid));
}

// A line is "0::/path" in version 2, which may be mounted beside version 1, and "6:freezer:/path" in version 1.
std::vector<FreezerFile> freezerFiles(std::string_view cgroups) {
  std::vector<FreezerFile> files;
  while (!cgroups.empty()) {
    const std::string_view line = cgroups.substr(0, cgroups.find('\n'));
    cgroups.remove_prefix(std::min(line.size() + 1, cgroups.size()));
    const size_t first = line.find(':');
    const size_t second = first == line.npos ? first : line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string_view controllers = line.substr(first + 1, second - first - 1);
    const std::string_view path = line.substr(second + 1);
    if (controllers.empty()) {
      for (const char* root : {"", "/unified"}) {
        files.push_back({fmt::format("{}{}/cgroup.events", root, path), "frozen 1"});
      }
    } else if (controllers == "freezer") {
      files.push_back({fmt::format("/freezer{}/freezer.state", path), "FROZEN"});
    }
  }
  return files;
}

bool isFrozen(int32_t pid) {
  const auto textOf = [](const std::string& path) {
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const auto files = freezerFiles(textOf(fmt::format("/proc/{}/cgroup", pid)));
  return std::any_of(files.begin(), files.end(), [&](const FreezerFile& file) {
    return textOf("/sys/fs/cgroup" + file.path).find(file.frozen) != std::string::npos;
  });
}

std::string describeLife(const Mate& mate) {
  const ProcessPage& page = mate.page();
  switch (page.life.load(std::memory_order_acquire)) {
    case Life::Running: return "it is running";
    case Life::Left: return fmt::format("it left: {}", page.farewell.read());
    case Life::Died: return "its process died";
  }
  return "it has overwritten its control page";
}

}  // namespace smddp::transport::shm
