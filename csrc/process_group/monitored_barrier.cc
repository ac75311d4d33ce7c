#include "process_group/monitored_barrier.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "process_group/errors.h"
#include "process_group/process_group.h"
#include "process_group/tags.h"

namespace smddp::process_group {
namespace {

// The messages have this much more time than the barrier. So no message times out, with an error that names no missing
// rank, before rank 0 has reported the missing ranks.
constexpr Nanoseconds kExtraTime = 5'000'000'000;

}  // namespace

MonitoredBarrier::MonitoredBarrier(std::shared_ptr<engine::Engine> engine,
                                   std::shared_ptr<engine::groups::Group> group)
    : engine_(std::move(engine)), group_(std::move(group)) {}

void MonitoredBarrier::run(Nanoseconds timeout, bool waitAllRanks) const {
  if (group_->spec.me == 0) {
    awaitRanks(timeout, waitAllRanks);
  } else {
    awaitRelease(timeout);
  }
}

engine::calls::CompletionPtr MonitoredBarrier::signal(bool send, Rank rank, int32_t tag,
                                                      Nanoseconds timeout) const {
  const auto byte = std::make_shared<std::byte>();
  engine::calls::Message message;
  message.send = send;
  message.peer = rank;
  message.tag = tag;
  message.buffer = {{byte.get(), 1}};
  message.keepAlive = byte;
  message.timeout = timeout;
  return translated([&] { return engine_->submit(*group_, std::move(message)); });
}

void MonitoredBarrier::awaitRelease(Nanoseconds timeout) const {
  // Rank 0 may have begun later. Its error names the missing rank, which this rank does not know.
  const Nanoseconds patience = timeout + kExtraTime;
  const auto here = signal(true, 0, kTagOfBarrier, patience);
  const auto go = signal(false, 0, kTagOfBarrierAnswer, patience);
  for (const auto& completion : {go, here}) {
    engine_->wait(*group_, *completion);
    if (!completion->error()) continue;
    throwAsTorch(
        Error(completion->error()->kind(),
              fmt::format("[Rank {0}]: Rank {0} successfully reached monitoredBarrier, but "
                          "received errors while waiting for send/recv from rank {1}. {2}",
                          group_->membership.jobRank(group_->spec.me),
                          group_->membership.jobRank(0), completion->error()->what())));
  }
}

void MonitoredBarrier::awaitRanks(Nanoseconds timeout, bool all) const {
  const MonotonicClock clock;
  const Deadline deadline = Deadline::after(clock, timeout);
  const auto giveUp = [&](ErrorKind kind, const std::string& text) {
    const Error error(kind, fmt::format("[Rank {}]: {}", group_->membership.jobRank(0), text));
    engine_->fail(*group_, error);
    throwAsTorch(error);
  };
  const auto inTime = fmt::format("in {} ms", timeout / 1'000'000);
  if (timeout <= 0) {
    giveUp(ErrorKind::Timeout, fmt::format("Rank {} timed out in monitoredBarrier {}",
                                           group_->membership.jobRank(0), inTime));
  }
  std::vector<engine::calls::CompletionPtr> here;
  for (Rank r = 1; r < group_->spec.size; ++r) {
    // The engine's own time-out must not come first, since its error does not speak of a barrier.
    here.push_back(signal(false, r, kTagOfBarrier, timeout + kExtraTime));
  }
  std::vector<Rank> missing;
  for (Rank r = 1; r < group_->spec.size && (all || missing.empty()); ++r) {
    const auto& completion = here[static_cast<size_t>(r - 1)];
    const Nanoseconds left = std::max<Nanoseconds>(deadline.at - clock.now(), 0);
    if (!engine_->waitFor(*group_, *completion, left))
      missing.push_back(group_->membership.jobRank(r));
    if (!completion->done() || !completion->error()) continue;
    giveUp(completion->error()->kind(),
           fmt::format("Rank {} failed to pass monitoredBarrier: {}", group_->membership.jobRank(r),
                       completion->error()->what()));
  }
  if (!missing.empty()) {
    giveUp(ErrorKind::Timeout,
           fmt::format("Rank{} {} failed to pass monitoredBarrier {}",
                       missing.size() > 1 ? "s" : "", fmt::join(missing, ", "), inTime));
  }
  std::vector<engine::calls::CompletionPtr> go;
  for (Rank r = 1; r < group_->spec.size; ++r)
    go.push_back(signal(true, r, kTagOfBarrierAnswer, kExtraTime));
  for (const auto& completion : go) {
    engine_->wait(*group_, *completion);
    if (completion->error()) throwAsTorch(*completion->error());
  }
}

void ProcessGroup::monitoredBarrier(const c10d::BarrierOptions& options, bool waitAllRanks) {
  MonitoredBarrier(engine_, order()->group).run(effectiveTimeout(options.timeout), waitAllRanks);
}

}  // namespace smddp::process_group
