#include "transport/shm/distance.h"

#include <algorithm>
#include <limits>

#include "common/config.h"
#include "common/error.h"

namespace smddp::transport::shm {

StagingStores parseStagingStores(std::string_view text) {
  if (text == "auto") return StagingStores::Auto;
  if (text == "ordinary") return StagingStores::Ordinary;
  if (text == "streaming") return StagingStores::Streaming;
  raise(ErrorKind::Usage, "SMDDP_STAGING_STORES={}: expects auto, ordinary or streaming", text);
}

StagingStores stagingStores() {
  // A virtual machine without a clock of its own asks the kernel, which takes longer than any line.
  constexpr Nanoseconds kSlowClock = 200;
  static const StagingStores stores = [] {
    const StagingStores wanted = parseStagingStores(settings().stagingStores);
    const bool blind = wanted == StagingStores::Auto && clockCost() > kSlowClock;
    return blind ? StagingStores::Ordinary : wanted;
  }();
  return stores;
}

Nanoseconds clockCost() {
  static const Nanoseconds cost = [] {
    const MonotonicClock clock;
    Nanoseconds least = std::numeric_limits<Nanoseconds>::max();
    for (int i = 0; i < 32; ++i) {
      const Nanoseconds begin = clock.now();
      least = std::min(least, clock.now() - begin);
    }
    return least;
  }();
  return cost;
}

}  // namespace smddp::transport::shm
