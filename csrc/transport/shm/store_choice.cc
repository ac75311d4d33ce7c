#include "transport/shm/store_choice.h"

#include <algorithm>

#include "common/error.h"

namespace smddp::transport::shm {

StagingStores parseStagingStores(std::string_view text) {
  if (text == "auto") return StagingStores::Auto;
  if (text == "ordinary") return StagingStores::Ordinary;
  if (text == "streaming") return StagingStores::Streaming;
  raise(ErrorKind::Internal, "{} is not a kind of stores", text);
}

const Clock& StoreChoice::monotonic() {
  static const MonotonicClock clock;
  return clock;
}

void StoreChoice::compare(Nanoseconds ordinary, Nanoseconds streaming) {
  constexpr int kSure = 4;
  // Streaming must win clearly: ordinary stores are better for a reader that shares a cache with the writer.
  votes_ += ordinary > streaming * 5 / 4 ? 1 : -1;
  if (votes_ >= kSure) streams_ = true;
  if (votes_ <= 0) streams_ = false;
  votes_ = std::clamp(votes_, 0, kSure);
}

}  // namespace smddp::transport::shm
