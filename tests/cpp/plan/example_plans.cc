#include "plan/example_plans.h"

#include <algorithm>
#include <functional>

namespace smddp::plan {
namespace {

constexpr int kCopied = 1;
constexpr int kSummed = 2;
constexpr int64_t kSlots = 2;

std::vector<Plan> forAllRanks(const Nodes& nodes,
                              const std::function<Plan(const Topology&)>& build) {
  std::vector<Plan> plans;
  const Topology first(nodes, 0);
  for (Rank r = 0; r < first.numRanks(); ++r) plans.push_back(build(first.seenBy(r)));
  return plans;
}

void forgetArrival(Plan& plan) {
  // The wait is the preamble's last step.
  plan.steps[plan.preamble.firstStep + plan.preamble.numSteps - 1].value = {};
}

}  // namespace

Limits smallLimits() {
  Limits limits;
  limits.chunkBytes = 128;
  limits.messageBytes = 128;
  limits.window = 2;
  limits.halfBytes = 4096;
  return limits;
}

Nodes makeNodes(int nodes, int local) {
  Nodes all(static_cast<size_t>(nodes));
  for (Rank r = 0; r < nodes * local; ++r) all[static_cast<size_t>(r / local)].push_back(r);
  return all;
}

std::vector<Plan> sumThroughSlots(const Nodes& nodes, const Limits& limits, int64_t bytes,
                                  Mistake mistake) {
  return forAllRanks(nodes, [&](const Topology& t) {
    Builder b(t, limits, "sum through slots");
    const uint8_t pool = b.pool("contributions", kSlots, limits.chunkBytes);
    const int me = t.myLocal();
    b.arrive();
    b.eachChunk(bytes, limits.chunkBytes, [&](const Chunk& c) {
      const int64_t reached = c.index + 1;
      const int64_t early = mistake == Mistake::SlotReusedEarly ? 1 : 0;
      b.stage("copy");
      b.waitMates(kSummed, reached - kSlots - early);
      // Another lane of this rank may still be reading the slot.
      b.waitRank(me, kSummed, reached - kSlots - early);
      const int owner = mistake == Mistake::WriteMatesSlot ? me ^ 1 : me;
      b.copy({b.slot(pool, owner, c.index, 0)}, b.in(c.offset), c.length);
      const bool silent = mistake == Mistake::TooFewSignals && c.length < c.fullLength;
      if (!silent) b.signal(kCopied, reached);

      b.stage("sum");
      if (mistake != Mistake::MissingWait) b.waitMates(kCopied, reached);
      b.waitRank(me, kCopied, reached);
      std::vector<Ref> sources;
      for (int mate = 0; mate < t.teamSize(); ++mate) {
        sources.push_back(b.slot(pool, mate, c.index, 0));
      }
      if (mistake == Mistake::ContributionTwice) sources.back() = sources.front();
      if (mistake == Mistake::OrderOnOneRank && t.me() == 1) {
        std::reverse(sources.begin(), sources.end());
      }
      const int64_t beyond = mistake == Mistake::OutsideBuffer ? 4096 : 0;
      b.reduce({b.out(c.offset + beyond)}, sources, c.length,
               {mistake != Mistake::NoPreScale, mistake != Mistake::NoFinalScale});
      b.signal(mistake == Mistake::SharedCounter ? kCopied : kSummed, reached);
    });
    Plan plan = b.done();
    if (mistake == Mistake::NoArrival) forgetArrival(plan);
    return plan;
  });
}

std::vector<Plan> sumByExchange(const Nodes& nodes, const Limits& limits, int64_t bytes,
                                Mistake mistake) {
  return forAllRanks(nodes, [&](const Topology& t) {
    Builder b(t, limits, "sum by exchange");
    const Rank peer = 1 - t.me();
    b.arrive();
    b.eachChunk(bytes, limits.messageBytes, [&](const Chunk& c) {
      b.stage("send");
      b.put(peer, 0, b.in(c.offset), c.length);
      b.stage("sum");
      const int64_t less = mistake == Mistake::LengthsDiffer && t.me() == 1 ? 4 : 0;
      const Ref other = mistake == Mistake::PostedTooEarly
                            ? b.receiveAt(b.out(c.offset), peer, 0, c.length)
                            : b.receive(peer, 0, c.length - less);
      if (mistake == Mistake::ReadAfterRelease) b.release(peer, 0);
      if (mistake != Mistake::MissingFlush) b.flush(peer, 0);
      std::vector<Ref> sources{b.in(c.offset), other};
      // The same order on both ranks.
      if (t.me() == 1 && mistake != Mistake::OrderOnOneRank) std::swap(sources[0], sources[1]);
      b.reduce({b.out(c.offset)}, sources, c.length, {true, true});
      if (mistake != Mistake::ReadAfterRelease) b.release(peer, 0);
    });
    Plan plan = b.done();
    for (Step& step : plan.steps) {
      const bool isWrong = (mistake == Mistake::MissingRelease && step.op == Op::Release) ||
                           (mistake == Mistake::NoReceive && step.op == Op::Receive);
      if (!isWrong) continue;
      step = Step{};
      step.op = Op::Wait;  // a wait for 0 has no effect
      step.counter = kCopied;
    }
    return plan;
  });
}

std::vector<Plan> sumInPlace(const Nodes& nodes, const Limits& limits, int64_t bytes,
                             bool staysForMates) {
  return forAllRanks(nodes, [&](const Topology& t) {
    Builder b(t, limits, "sum in place");
    b.arrive();
    const Range mine = share({0, bytes}, t.myLocal(), t.teamSize(), bytes);
    b.stage("sum");
    std::vector<Ref> sources, destinations;
    for (int mate = 0; mate < t.teamSize(); ++mate) {
      sources.push_back(b.mateIn(mate, mine.offset));
      destinations.push_back(b.mateOut(mate, mine.offset));
    }
    b.reduce(destinations, sources, mine.length, {true, true});
    b.signal(kSummed, 1);
    if (staysForMates) b.waitMates(kSummed, 1);
    return b.done();
  });
}

std::vector<Plan> sendFromSlot(const Nodes& nodes, const Limits& limits, int64_t bytes,
                               Mistake mistake) {
  return forAllRanks(nodes, [&](const Topology& t) {
    Builder b(t, limits, "send from a slot");
    const uint8_t pool = b.pool("outgoing", 1, bytes);
    b.arrive();
    b.stage("move");
    if (t.me() == 0) {
      b.copy({b.slot(pool, 0, 0, 0)}, b.in(0), bytes);
      b.put(1, 0, b.slot(pool, 0, 0, 0), bytes);
      if (mistake != Mistake::MissingFlush) b.flush(1, 0);
    } else {
      const Ref message = b.receive(0, 0, bytes);
      if (mistake == Mistake::ReadAfterRelease) b.release(0, 0);
      b.copy({b.out(0)}, message, bytes);
      if (mistake != Mistake::ReadAfterRelease) b.release(0, 0);
    }
    return b.done();
  });
}

}  // namespace smddp::plan
