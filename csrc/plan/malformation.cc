#include "plan/malformation.h"

#include <algorithm>
#include <map>
#include <tuple>

#include <fmt/format.h>

#include "plan/print.h"
#include "plan/topology.h"

namespace smddp::plan {
namespace {

// Inspects one rank's plan. `problem_` keeps the first complaint.
class Inspection {
 public:
  Inspection(const Topology& topology, const Limits& limits, const Execution& execution)
      : topology_(topology),
        limits_(limits),
        execution_(execution),
        plan_(execution.plans[topology.me()]) {}

  std::string run() {
    inspectPools();
    inspectBlock(plan_.preamble, "preamble");
    inspectArrival();
    for (const Lane& lane : plan_.lanes) {
      for (const Block& block : lane.blocks) inspectBlock(block, lane.name);
    }
    return problem_;
  }

 private:
  template <typename... Args>
  void require(bool holds, fmt::format_string<Args...> format, Args&&... args) {
    if (holds || !problem_.empty()) return;
    problem_ =
        fmt::format("rank {}: ", topology_.me()) + fmt::format(format, std::forward<Args>(args)...);
  }

  void inspectPools() {
    for (const Pool& pool : plan_.pools) {
      require(pool.slots > 0 && pool.slotBytes >= 0 && pool.offset >= 0 &&
                  pool.offset + pool.slots * pool.slotBytes <= plan_.stagingBytes,
              "pool {} exceeds the {} bytes of all pools", pool.name, plan_.stagingBytes);
    }
    require(plan_.stagingBytes <= limits_.halfBytes, "pools of {} bytes, {} are allowed",
            plan_.stagingBytes, limits_.halfBytes);
    // A rank computes the addresses of its mates' slots from the pools of its own plan.
    const Plan& first = execution_.plans[topology_.team().front()];
    const auto equal = [](const Pool& a, const Pool& b) {
      return std::tie(a.slots, a.slotBytes, a.offset) == std::tie(b.slots, b.slotBytes, b.offset);
    };
    require(std::equal(plan_.pools.begin(), plan_.pools.end(), first.pools.begin(),
                       first.pools.end(), equal),
            "its pools differ from those of rank {}", topology_.team().front());
    // The owner of a buffer must know that its mates use it.
    require(plan_.zeroCopy == first.zeroCopy, "zero-copy here but not on rank {}, or the reverse",
            topology_.team().front());
  }

  // The preamble must end with the arrival. Staging halves rely on it: no plan may end before the rank has seen
  // all its mates arrive. And before the arrival ranks have not agreed on anything.
  void inspectArrival() {
    const Block& preamble = plan_.preamble;
    require(preamble.trips == 1 && preamble.numSteps >= 2, "the preamble is not an arrival");
    if (!problem_.empty()) return;
    const Step* end = plan_.steps.data() + preamble.firstStep + preamble.numSteps;
    const auto isArrival = [](const Step& step, Op op) {
      return step.op == op && step.counter == kArrival && step.who == kMates &&
             step.value == Affine{1, 0};
    };
    require(isArrival(end[-2], Op::Signal), "the preamble does not signal the arrival");
    require(isArrival(end[-1], Op::Wait), "the preamble does not wait for the team's arrival");
    const auto count = std::count_if(end - preamble.numSteps, end, [](const Step& step) {
      const bool usesCounter = step.op == Op::Signal || step.op == Op::Wait;
      return usesCounter && step.counter == kArrival;
    });
    require(count == 2, "the preamble uses the arrival counter {} times", count);
    // Ranks choose a zero-copy plan after the arrival, so nothing in it can precede the arrival.
    require(!plan_.zeroCopy || preamble.numSteps == 2, "a zero-copy plan moves before the arrival");
  }

  void inspectBlock(const Block& block, const std::string& stage) {
    const bool inside = block.firstStep + uint64_t{block.numSteps} <= plan_.steps.size();
    require(inside && block.trips >= 0, "stage {}: a block beyond the steps", stage);
    if (!inside) return;
    for (uint32_t i = block.firstStep; i < block.firstStep + block.numSteps; ++i) {
      const Step& step = plan_.steps[i];
      require(uint64_t{step.firstRef} + step.numRefs() <= plan_.refs.size(),
              "stage {}: references beyond the end", stage);
      if (!problem_.empty()) return;
      const std::string complaint = complaintAbout(step, &block == &plan_.preamble);
      require(complaint.empty(), "stage {}, {}: {}", stage, printStep(plan_, step), complaint);
    }
  }

  std::string complaintAbout(const Step& step, bool inPreamble) const {
    switch (step.op) {
      case Op::Copy:
      case Op::Reduce: return aboutMove(step);
      case Op::Signal:
      case Op::Wait: return aboutCounter(step, inPreamble);
      case Op::Put:
      case Op::Post:
      case Op::Receive:
      case Op::Release:
      case Op::Flush: return aboutChannel(step);
    }
    return "an unknown operation";
  }

  std::string aboutMove(const Step& step) const {
    if (step.numDestinations == 0 || step.numSources == 0) return "nothing to move";
    if (step.op == Op::Copy && step.numSources != 1) return "a copy has one source";
    if (step.length <= 0 || step.length % execution_.elementBytes != 0) return "a wrong length";
    if (plan_.wire != Wire::fp32 && step.length % 4 != 0) return "a part of a float32";
    if (const std::string text = aboutDestinations(step); !text.empty()) return text;
    if (const std::string text = aboutResidual(step); !text.empty()) return text;
    return aboutSources(step);
  }

  std::string aboutDestinations(const Step& step) const {
    for (int i = 0; i < step.numDestinations; ++i) {
      const Ref& ref = plan_.destination(step, i);
      const bool isOwnSlot = ref.space == Space::Slot && ref.owner == topology_.myLocal();
      const bool isOutput = ref.space == Space::Output || ref.space == Space::MateOutput;
      if (!isOwnSlot && !isOutput) return "only outputs and own slots may be written";
      if (const std::string text = aboutRef(ref); !text.empty()) return text;
    }
    return {};
  }

  std::string aboutResidual(const Step& step) const {
    if (!step.hasResidual) return {};
    const Ref& residual = plan_.residual(step);
    if (residual.space != Space::Residual || residual.isEncoded) return "no residual";
    const Ref* first = &plan_.destination(step, 0);
    const bool encodes = std::any_of(first, first + step.numDestinations,
                                     [](const Ref& ref) { return ref.isEncoded; });
    return encodes ? aboutRef(residual) : "a residual of what is not encoded";
  }

  std::string aboutSources(const Step& step) const {
    for (int i = 0; i < step.numSources; ++i) {
      if (plan_.source(step, i).space == Space::Residual) return "a residual as a source";
      if (const std::string text = aboutRef(plan_.source(step, i)); !text.empty()) return text;
    }
    return {};
  }

  std::string aboutRef(const Ref& ref) const {
    const bool isMate = ref.space == Space::MateInput || ref.space == Space::MateOutput;
    if (isMate && !plan_.zeroCopy) return "a mate's buffer in a plan that is not zero-copy";
    if ((isMate || ref.space == Space::Slot) &&
        (ref.owner < 0 || ref.owner >= topology_.teamSize())) {
      return "no such mate";
    }
    if (ref.space == Space::Slot && ref.poolOrStream >= plan_.pools.size()) return "no such pool";
    if (ref.isEncoded) {
      if (plan_.wire == Wire::fp32) return "encoded without a wire format";
      // Only messages and the slots that they leave from are encoded.
      const bool isBuffer = ref.space != Space::Slot && ref.space != Space::Message;
      return isBuffer ? "a buffer that is encoded" : "";
    }
    if (ref.offset.base % execution_.elementBytes != 0 ||
        ref.offset.perTrip % execution_.elementBytes != 0) {
      return "an offset inside an element";
    }
    return {};
  }

  std::string aboutCounter(const Step& step, bool inPreamble) const {
    if (step.counter >= kNumCounters) return "no such counter";
    if (step.counter == kArrival && !inPreamble) return "the arrival belongs to the preamble";
    if (step.op == Op::Wait && step.who != kMates &&
        (step.who < 0 || step.who >= topology_.teamSize())) {
      return "no such mate";
    }
    return {};
  }

  std::string aboutChannel(const Step& step) const {
    if (step.who < 0 || step.who >= topology_.numRanks() ||
        topology_.nodeOf(step.who) == topology_.myNode()) {
      return "a channel leads to a rank of another node";
    }
    if (step.stream >= kNumStreams) return "no such stream";
    const bool declared = std::any_of(
        plan_.channels.begin(), plan_.channels.end(),
        [&](const ChannelUse& use) { return use.peer == step.who && use.stream == step.stream; });
    if (!declared) return "the plan does not declare this channel";
    if (step.op == Op::Post) {
      const bool isOne = step.numSources == 0 && step.numDestinations == 1 && step.length > 0;
      return isOne ? aboutDestinations(step) : "a message is posted at one destination";
    }
    if (step.op != Op::Put) return {};
    if (step.length < 0 || step.length > limits_.messageBytes) return "a message too long";
    if (step.numSources != 1 || step.numDestinations != 0) return "a put has one source";
    if (!plan_.source(step, 0).isEncoded && step.length % execution_.elementBytes != 0)
      return "a message that cuts an element";
    return aboutSources(step);
  }

  const Topology& topology_;
  const Limits& limits_;
  const Execution& execution_;
  const Plan& plan_;
  std::string problem_;
};

// Compares the numbers of messages that both ends of every channel declare. Returns the first difference as text.
std::string disagreement(const Execution& execution) {
  std::map<std::tuple<Rank, Rank, int>, std::pair<int64_t, int64_t>> messages;  // from, to, stream
  for (Rank r = 0; r < static_cast<Rank>(execution.plans.size()); ++r) {
    for (const ChannelUse& use : execution.plans[r].channels) {
      messages[{r, use.peer, use.stream}].first += use.puts;
      messages[{use.peer, r, use.stream}].second += use.receives;
    }
  }
  for (const auto& [key, count] : messages) {
    if (count.first == count.second) continue;
    const auto [from, to, stream] = key;
    return fmt::format("stream {}: rank {} declares {} messages to rank {}, which expects {}",
                       stream, from, count.first, to, count.second);
  }
  return {};
}

}  // namespace

std::string findMalformation(const std::vector<std::vector<Rank>>& nodes, const Limits& limits,
                             const Execution& execution) {
  const Topology first(nodes, 0);
  const auto numRanks = static_cast<size_t>(first.numRanks());
  SMDDP_CHECK(execution.plans.size() == numRanks && execution.inputBytes.size() == numRanks &&
                  execution.outputBytes.size() == numRanks,
              "{} plans for {} ranks", execution.plans.size(), numRanks);
  for (Rank r = 0; r < first.numRanks(); ++r) {
    std::string problem = Inspection(first.seenBy(r), limits, execution).run();
    if (!problem.empty()) return problem;
  }
  return disagreement(execution);
}

}  // namespace smddp::plan
