#include "transport/shm/liveness.h"

#include <linux/futex.h>

#include <cstring>

#include "common/error.h"

namespace smddp::transport::shm {
namespace {

constexpr Nanoseconds kMillisecond = 1'000'000;

// The first word of a robust mutex is part of the interface between glibc and the kernel. It has the holder's thread id
// and a bit that the kernel sets when that thread dies. To read it costs a load. pthread_mutex_trylock() would write to
// the cache line.
uint32_t futexWord(const ProcessPage& page) {
  return static_cast<uint32_t>(__atomic_load_n(&page.lifeline.__data.__lock, __ATOMIC_ACQUIRE));
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

Lifeline::Lifeline(std::shared_ptr<Slab> slab) : slab_(std::move(slab)) {
  ProcessPage& page = slab_->page();
  const int error = pthread_mutex_trylock(&page.lifeline);
  SMDDP_CHECK(error == 0, "the lifeline is held already: {}", std::strerror(error));
  page.lifelineHeld.store(1, std::memory_order_release);
}

Lifeline::~Lifeline() {
  ProcessPage& page = slab_->page();
  // In this order: a mate must not look at the mutex after the release.
  page.lifelineHeld.store(0, std::memory_order_release);
  pthread_mutex_unlock(&page.lifeline);
}

Life lifeOf(Mate& mate) {
  ProcessPage& page = mate.page();
  const Life life = page.life.load(std::memory_order_acquire);
  if (life != Life::Running) return life;
  const bool held = page.lifelineHeld.load(std::memory_order_acquire) != 0;
  if (held && (futexWord(page) & FUTEX_OWNER_DIED) != 0) return publishDeath(page);
  if (!timeToProbe(mate.probe(), held) || page.startTime == 0) return Life::Running;
  // With another start time the pid belongs to a new process, so our mate is dead.
  return startTimeOf(page.pid).value_or(page.startTime) == page.startTime ? Life::Running
                                                                          : publishDeath(page);
}

bool isStopped(const Mate& mate) {
  const auto stat = statOf(mate.page().pid);
  return stat && stat->stopped;
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
