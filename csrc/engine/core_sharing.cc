#include "engine/core_sharing.h"

#include <algorithm>
#include <limits>

namespace smddp::engine {
namespace {

// A move costs some ten microseconds; a look does not, but who shares a core knows it at once.
constexpr Nanoseconds kLookPeriod = 1'000'000;
constexpr Nanoseconds kMovePeriod = 10'000'000;

}  // namespace

std::optional<cpu_set_t> lessCrowded(const cpu_set_t& allowed, int mine,
                                     std::span<const int> mates) {
  const auto crowd = [&](int core) { return std::count(mates.begin(), mates.end(), core); };
  if (mine < 0 || crowd(mine) == 0) return std::nullopt;
  auto fewest = std::numeric_limits<std::ptrdiff_t>::max();
  cpu_set_t best;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed)) continue;
    if (crowd(core) < fewest) {
      fewest = crowd(core);
      CPU_ZERO(&best);
    }
    if (crowd(core) == fewest) CPU_SET(core, &best);
  }
  // We count where we come to, and no longer where we were.
  if (fewest >= crowd(mine)) return std::nullopt;
  return best;
}

void CoreSharing::moveApart(std::span<const transport::shm::ProcessPage* const> mates,
                            Nanoseconds now) {
  if (now < nextLook_) return;
  nextLook_ = now + kLookPeriod;
  note();
  const int mine = page_.core.load(std::memory_order_relaxed);
  std::vector<int> cores;
  for (const auto* mate : mates) cores.push_back(mate->core.load(std::memory_order_relaxed));
  if (std::find(cores.begin(), cores.end(), mine) == cores.end()) return;
  cpu_set_t allowed;
  // Fails on machines with more cores than a cpu_set_t has room for: the kernel places them, as it does elsewhere.
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  const auto better = lessCrowded(allowed, mine, cores);
  if (!better) return;
  nextLook_ = now + kMovePeriod;
  if (sched_setaffinity(0, sizeof *better, &*better) != 0) return;
  note();
  sched_setaffinity(0, sizeof allowed, &allowed);
}

}  // namespace smddp::engine
