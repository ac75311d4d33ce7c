// The barrier that knows who is missing.
#include <fmt/ranges.h>

#include <algorithm>

#include "process_group/errors.h"
#include "process_group/process_group.h"
#include "process_group/tags.h"

namespace smddp::process_group {
namespace {

// How much longer than its time-out a rank waits for rank 0 to say who is missing.
constexpr Nanoseconds kVerdict = 5'000'000'000;

}  // namespace

// A byte that arrives says that its sender has come, or that its receiver may go.
engine::CompletionPtr ProcessGroup::signal(bool send, Rank peer, int32_t tag, Nanoseconds timeout) {
  const auto byte = std::make_shared<std::byte>();
  auto message = newMessage(send, peer, tag, {{byte.get(), 1}});
  message.keepAlive = byte;
  message.timeout = timeout;
  return translated([&] { return engine_->submit(*group(), std::move(message)); });
}

void ProcessGroup::monitoredBarrier(const c10d::BarrierOptions& options, bool waitAllRanks) {
  const auto target = group();
  const Nanoseconds timeout = nanoseconds(options.timeout);
  if (getRank() == 0) {
    awaitRanks(*target, timeout, waitAllRanks);
    return;
  }
  // Rank 0 may have begun later. Its verdict names the rank at fault, ours could not.
  const Nanoseconds patience = timeout + kVerdict;
  const auto here = signal(true, 0, kTagOfBarrier, patience);
  const auto go = signal(false, 0, kTagOfRelease, patience);
  for (const auto& completion : {go, here}) {
    engine_->wait(*completion);
    if (!completion->error()) continue;
    throwAsTorch(
        Error(completion->error()->kind(),
              fmt::format("[Rank {0}]: Rank {0} successfully reached monitoredBarrier, but "
                          "received errors while waiting for send/recv from rank 0. {1}",
                          getRank(), completion->error()->what())));
  }
}

// Rank 0's part.
void ProcessGroup::awaitRanks(engine::Group& target, Nanoseconds timeout, bool all) {
  const MonotonicClock clock;
  const Deadline deadline = Deadline::after(clock, timeout);
  const auto giveUp = [&](ErrorKind kind, const std::string& text) {
    const Error error(kind, "[Rank 0]: " + text);
    engine_->fail(target, error);
    throwAsTorch(error);
  };
  const auto inTime = fmt::format("in {} ms", timeout / 1'000'000);
  if (timeout <= 0) {
    giveUp(ErrorKind::Timeout, fmt::format("Rank 0 timed out in monitoredBarrier {}", inTime));
  }
  std::vector<engine::CompletionPtr> here;
  for (Rank r = 1; r < getSize(); ++r) {
    // The engine's own time-out knows nothing of barriers: it must not come first.
    here.push_back(signal(false, r, kTagOfBarrier, timeout + kVerdict));
  }
  std::vector<Rank> missing;
  for (Rank r = 1; r < getSize() && (all || missing.empty()); ++r) {
    const auto& completion = here[static_cast<size_t>(r - 1)];
    const Nanoseconds left = std::max<Nanoseconds>(deadline.at - clock.now(), 0);
    if (!engine_->waitFor(*completion, left)) missing.push_back(r);
    if (!completion->done() || !completion->error()) continue;
    giveUp(completion->error()->kind(), fmt::format("Rank {} failed to pass monitoredBarrier: {}",
                                                    r, completion->error()->what()));
  }
  if (!missing.empty()) {
    giveUp(ErrorKind::Timeout,
           fmt::format("Rank{} {} failed to pass monitoredBarrier {}",
                       missing.size() > 1 ? "s" : "", fmt::join(missing, ", "), inTime));
  }
  std::vector<engine::CompletionPtr> go;
  for (Rank r = 1; r < getSize(); ++r) go.push_back(signal(true, r, kTagOfRelease, kVerdict));
  for (const auto& completion : go) {
    engine_->wait(*completion);
    if (completion->error()) throwAsTorch(*completion->error());
  }
}

}  // namespace smddp::process_group
