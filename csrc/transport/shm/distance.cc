#include "transport/shm/distance.h"

#include <algorithm>
#include <array>
#include <limits>
#include <memory>

#include "common/config.h"
#include "common/error.h"
#include "common/stream_copy.h"

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

Nanoseconds memoryLatency() {
  constexpr size_t kLoads = 65;
  constexpr size_t kPage = 4096;
  constexpr Nanoseconds kLongerThanAny = 1'000'000'000;
  static const Nanoseconds latency = [] {
    const MonotonicClock clock;
    // A page for each load: nothing fetches its line ahead.
    const auto pages = std::make_unique<std::byte[]>(kLoads * kPage);
    std::array<Nanoseconds, kLoads> durations{};
    for (size_t i = 0; i < kLoads; ++i) {
      const volatile std::byte* const line = pages.get() + i * kPage;
      // The page's address is known to the processor, the line is not in its caches.
      static_cast<void>(line[kPage / 2]);
      if (!dropFromCaches(const_cast<const std::byte*>(line))) return kLongerThanAny;
      const Nanoseconds begin = clock.now();
      static_cast<void>(line[0]);
      durations[i] = clock.now() - begin - clockCost();
    }
    const auto median = durations.begin() + kLoads / 2;
    std::nth_element(durations.begin(), median, durations.end());
    return *median;
  }();
  return latency;
}

}  // namespace smddp::transport::shm
