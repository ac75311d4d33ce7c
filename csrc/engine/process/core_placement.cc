#include "engine/process/core_placement.h"

#include <algorithm>
#include <limits>

namespace smddp::engine::process {
namespace {

// A move costs a few tens of microseconds. To try costs less, but nothing new is known a moment later.
constexpr Nanoseconds kTryPeriod = 1'000'000;
constexpr Nanoseconds kMovePeriod = 10'000'000;

}  // namespace

std::optional<cpu_set_t> coresWithFewestMates(const cpu_set_t& allowed, int mine,
                                              std::span<const int> mates) {
  const auto matesOn = [&](int core) { return std::count(mates.begin(), mates.end(), core); };
  if (mine < 0 || matesOn(mine) == 0) return std::nullopt;
  auto fewest = std::numeric_limits<std::ptrdiff_t>::max();
  cpu_set_t best;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed)) continue;
    if (matesOn(core) < fewest) {
      fewest = matesOn(core);
      CPU_ZERO(&best);
    }
    if (matesOn(core) == fewest) CPU_SET(core, &best);
  }
  // This thread counts on the core it moves to, and no longer on the one it leaves.
  if (fewest >= matesOn(mine)) return std::nullopt;
  return best;
}

void CorePlacement::moveApart(std::span<const transport::shm::ProcessPage* const> mates,
                              Nanoseconds now) {
  if (now < nextTry_) return;
  nextTry_ = now + kTryPeriod;
  note();
  const int mine = page_.core.load(std::memory_order_relaxed);
  std::vector<int> cores;
  for (const auto* mate : mates) cores.push_back(mate->core.load(std::memory_order_relaxed));
  if (std::find(cores.begin(), cores.end(), mine) == cores.end()) return;
  cpu_set_t allowed;
  // Fails on machines with more cores than a cpu_set_t has room for; there the kernel alone decides.
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  const auto better = coresWithFewestMates(allowed, mine, cores);
  if (!better) return;
  nextTry_ = now + kMovePeriod;
  if (sched_setaffinity(0, sizeof *better, &*better) != 0) return;
  note();
  sched_setaffinity(0, sizeof allowed, &allowed);
}

}  // namespace smddp::engine::process
