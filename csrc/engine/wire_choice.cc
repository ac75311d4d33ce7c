#include "engine/wire_choice.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "common/clock.h"
#include "common/log.h"

namespace smddp::engine {
namespace {

// The vector is so long that its bytes take the time, and not the steps: at 1 Gbit/s, 2 nodes exchange it in 17 ms.
constexpr size_t kElements = (2 << 20) / sizeof(float);
// The first rounds of a format open channels and touch memory for the first time, and formats that encode touch more of
// it: with 4 nodes on loopback bf16 takes 25, 17, 11, 11, 3, 3, 2, 3 ms. The fastest of the other rounds counts.
constexpr int kWarmUps = 4;
constexpr int kRounds = 8;

// The memory that the allreduces read and write. If one of them fails, its group keeps this: the network may still use
// it.
struct Buffers {
  std::vector<float> vector;
  WireTimes times;
};

// Averages or compares `values`, which are in `buffers`, over all ranks.
void allReduce(Engine& engine, groups::Group& group, const std::shared_ptr<Buffers>& buffers,
               std::span<float> values, ReduceOp op, Nanoseconds timeout) {
  calls::Request request;
  request.collective = collectives::Collective::AllReduce;
  request.type = DataType::float32;
  request.op = op;
  request.output = {std::as_writable_bytes(values)};
  request.bytes = static_cast<int64_t>(values.size_bytes());
  request.timeout = timeout;
  request.keepAlive = buffers;
  engine.run(group, std::move(request));
}

// The times of this rank.
WireTimes measured(Engine& engine, groups::Group& group, Nanoseconds timeout) {
  const MonotonicClock clock;
  const auto buffers = std::make_shared<Buffers>();
  buffers->vector.assign(kElements, 1.0f);
  const std::span<float> vector = buffers->vector;
  WireTimes times;
  times.fill(std::numeric_limits<float>::max());
  for (int round = 0; round < kRounds; ++round) {
    for (const Wire wire : {Wire::fp32, Wire::bf16, Wire::int8}) {
      engine.progress().call([&] { group.plans.useWire(wire); });
      // Makes all ranks begin together. Its four bytes are never encoded.
      allReduce(engine, group, buffers, vector.first(1), ReduceOp::MAX, timeout);
      const Nanoseconds start = clock.now();
      allReduce(engine, group, buffers, vector, ReduceOp::AVG, timeout);
      const float seconds = static_cast<float>(clock.now() - start) * 1e-9f;
      float& best = times[static_cast<size_t>(wire)];
      if (round >= kWarmUps) best = std::min(best, seconds);
    }
  }
  return times;
}

}  // namespace

Wire worthwhile(const WireTimes& times) {
  constexpr float kWorthIt = 0.75f;
  Wire best = Wire::fp32;
  for (const Wire shorter : {Wire::bf16, Wire::int8}) {
    if (times[static_cast<size_t>(shorter)] <= kWorthIt * times[static_cast<size_t>(best)])
      best = shorter;
  }
  return best;
}

WireTimes useWorthwhile(Engine& engine, groups::Group& group, const WireTimes& mine,
                        Nanoseconds timeout) {
  const auto buffers = std::make_shared<Buffers>(Buffers{{}, mine});
  allReduce(engine, group, buffers, buffers->times, ReduceOp::MAX, timeout);
  engine.progress().call([&] { group.plans.useWire(worthwhile(buffers->times)); });
  return buffers->times;
}

void chooseWire(Engine& engine, const std::shared_ptr<groups::Group>& group, Nanoseconds timeout) {
  if (group->wire.wire.has_value() || !group->membership.spansNodes()) return;
  // All ranks have the same reason, so none of them measures.
  if (const auto reason = group->plans.whyOnlyFp32()) {
    if (group->spec.me != 0) return;
    SMDDP_LOG(Warn, "engine",
              "group \"{}\" sends fp32 between nodes: with {} no other format is possible "
              "(SMDDP_WIRE=auto; docs/wire.md)",
              group->spec.name, *reason);
    return;
  }
  WireTimes times;
  try {
    times = useWorthwhile(engine, *group, measured(engine, *group, timeout), timeout);
  } catch (...) {
    engine.destroyGroup(group);
    throw;
  }
  if (group->spec.me != 0) return;
  const auto milliseconds = [&](Wire wire) { return 1e3f * times[static_cast<size_t>(wire)]; };
  SMDDP_LOG(Warn, "engine",
            "group \"{}\" sends {} between nodes: an allreduce of 2 MiB takes {:.3g} ms as fp32, "
            "{:.3g} ms as bf16 and {:.3g} ms as int8 (SMDDP_WIRE=auto; docs/wire.md)",
            group->spec.name, toString(group->plans.wire()), milliseconds(Wire::fp32),
            milliseconds(Wire::bf16), milliseconds(Wire::int8));
}

}  // namespace smddp::engine
