#include "plan/print.h"

#include <fmt/format.h>

namespace smddp::plan {
namespace {

std::string number(Affine a) {
  if (a.perTrip == 0) return fmt::format("{}", a.base);
  const std::string slope = a.perTrip == 1    ? "k"
                            : a.perTrip == -1 ? "-k"
                                              : fmt::format("{}k", a.perTrip);
  return a.base == 0 ? slope : fmt::format("{}{:+}", slope, a.base);
}

// Texts number messages from 1, as Put does; a Ref counts from 0.
std::string messageNumber(Affine index) { return number({index.base + 1, index.perTrip}); }

std::string slotNumber(const Plan& plan, const Ref& ref) {
  const int64_t slots =
      ref.poolOrStream < plan.pools.size() ? plan.pools[ref.poolOrStream].slots : 0;
  if (slots <= 0) return number(ref.index);
  if (ref.index.perTrip == 0) return fmt::format("{}", ref.index.base % slots);
  const bool isSum = ref.index.base != 0;
  return fmt::format("{}{}{}%{}", isSum ? "(" : "", number(ref.index), isSum ? ")" : "", slots);
}

std::string memory(const Plan& plan, const Ref& ref) {
  switch (ref.space) {
    case Space::Input: return "in";
    case Space::Output: return "out";
    case Space::Residual: return "residual";
    case Space::MateInput: return fmt::format("mate {}'s in", ref.owner);
    case Space::MateOutput: return fmt::format("mate {}'s out", ref.owner);
    case Space::Slot: {
      const bool known = ref.poolOrStream < plan.pools.size();
      return fmt::format("mate {}'s {} slot {} ", ref.owner,
                         known ? plan.pools[ref.poolOrStream].name : "unknown",
                         slotNumber(plan, ref));
    }
    case Space::Message: {
      const std::string stream =
          ref.poolOrStream == 0 ? "" : fmt::format(" stream {}", ref.poolOrStream);
      return fmt::format("rank {}{} message {} ", ref.owner, stream, messageNumber(ref.index));
    }
  }
  return "?";
}

std::string place(const Plan& plan, const Ref& ref, int64_t length) {
  return fmt::format("{}[{}, +{}{})", memory(plan, ref), number(ref.offset), length,
                     ref.isEncoded ? fmt::format(" {}", toString(plan.wire)) : "");
}

std::string list(const Plan& plan, const Step& step, uint32_t first, uint32_t count) {
  std::string text;
  for (uint32_t i = first; i < first + count && i < plan.refs.size(); ++i) {
    text +=
        (text.empty() ? "" : ", ") + place(plan, plan.refs[i], plan.bytesOf(step, plan.refs[i]));
  }
  return text;
}

const char* word(Op op) {
  switch (op) {
    case Op::Copy: return "copy";
    case Op::Reduce: return "reduce";
    case Op::Signal: return "signal";
    case Op::Wait: return "wait";
    case Op::Put: return "put";
    case Op::Post: return "post";
    case Op::Receive: return "receive";
    case Op::Release: return "release";
    case Op::Flush: return "flush";
  }
  return "?";
}

// Names the scales and the residual that a copy or a reduction applies.
std::string extras(const Plan& plan, const Step& step) {
  return fmt::format(
      "{}{}{}", step.preScale ? ", pre-scaled" : "", step.postScale ? ", final" : "",
      step.hasResidual ? ", with " + place(plan, plan.residual(step), step.length) : "");
}

// Adds the work of all trips of a block.
void add(Totals& sum, const Plan& plan, const Block& block) {
  for (uint32_t i = 0; i < block.numSteps; ++i) {
    const Step& step = plan.steps[block.firstStep + i];
    const int64_t bytes = step.length * block.trips;
    sum.steps += block.trips;
    if (step.op == Op::Put) sum.messages += block.trips;
    if (step.op == Op::Put) sum.bytesPut += bytes;
    if (step.op == Op::Copy) sum.bytesCopied += bytes * step.numDestinations;
    if (step.op == Op::Reduce) sum.bytesReduced += bytes * step.numSources;
  }
}

std::string printBlock(const Plan& plan, const Block& block, const char* indent) {
  std::string text;
  for (uint32_t i = 0; i < block.numSteps; ++i) {
    text += fmt::format("{}{}\n", indent, printStep(plan, plan.steps[block.firstStep + i]));
  }
  return text;
}

}  // namespace

Totals totals(const Plan& plan) {
  Totals sum;
  add(sum, plan, plan.preamble);
  for (const Lane& lane : plan.lanes) {
    for (const Block& block : lane.blocks) add(sum, plan, block);
  }
  return sum;
}

std::string printStep(const Plan& plan, const Step& step) {
  const std::string stream = step.stream == 0 ? "" : fmt::format(" stream {}", step.stream);
  switch (step.op) {
    case Op::Copy:
    case Op::Reduce:
      return fmt::format("{} {} <- {}{}", word(step.op),
                         list(plan, step, step.firstRef, step.numDestinations),
                         list(plan, step, step.firstRef + step.numDestinations, step.numSources),
                         extras(plan, step));
    case Op::Signal:
      return fmt::format("signal {} = {}",
                         step.counter == kArrival ? "arrival" : fmt::format("c{}", step.counter),
                         number(step.value));
    case Op::Wait:
      return fmt::format("wait {} of {} >= {}",
                         step.counter == kArrival ? "arrival" : fmt::format("c{}", step.counter),
                         step.who == kMates ? "the team" : fmt::format("mate {}", step.who),
                         number(step.value));
    case Op::Put:
      return fmt::format("put to rank {}{} <- {}, message {}", step.who, stream,
                         list(plan, step, step.firstRef, step.numSources), number(step.value));
    case Op::Post:
      return fmt::format("post {} for message {} from rank {}{}",
                         list(plan, step, step.firstRef, step.numDestinations), number(step.value),
                         step.who, stream);
    case Op::Receive:
      return fmt::format("receive from rank {}{} {} bytes, message {}", step.who, stream,
                         step.length, number(step.value));
    case Op::Release:
      return fmt::format("release to rank {}{} up to message {}", step.who, stream,
                         number(step.value));
    case Op::Flush:
      return fmt::format("flush to rank {}{} up to message {}", step.who, stream,
                         number(step.value));
  }
  return "?";
}

std::string printStepAt(const Plan& plan, const Step& step, int64_t trip) {
  // Make a plan of this one step, with the numbers of the trip filled in.
  Plan one;
  one.pools = plan.pools;
  one.wire = plan.wire;
  Step now = step;
  now.firstRef = 0;
  now.value = {step.value.at(trip), 0};
  for (uint32_t i = 0; i < step.numRefs(); ++i) {
    Ref ref = plan.refs[step.firstRef + i];
    ref.index = {ref.index.at(trip), 0};
    ref.offset = {ref.offset.at(trip), 0};
    one.refs.push_back(ref);
  }
  return printStep(one, now);
}

std::string print(const Plan& plan, const Topology& topology) {
  const std::string wire =
      plan.wire == Wire::fp32 ? "" : fmt::format(", {} between nodes", toString(plan.wire));
  std::string text =
      fmt::format("{}, rank {} of {} (node {} of {}, local {}){}{}\n", plan.name, topology.me(),
                  topology.numRanks(), topology.myNode(), topology.numNodes(), topology.myLocal(),
                  plan.zeroCopy ? ", zero-copy" : "", wire);
  for (const Pool& pool : plan.pools) {
    text += fmt::format("  pool {}: {} x {} bytes\n", pool.name, pool.slots, pool.slotBytes);
  }
  for (const ChannelUse& use : plan.channels) {
    text += fmt::format("  channel with rank {}, stream {}, messages: {} out, {} in\n", use.peer,
                        use.stream, use.puts, use.receives);
  }
  text += "  preamble\n" + printBlock(plan, plan.preamble, "    ");
  for (const Lane& lane : plan.lanes) {
    text += fmt::format("  stage {}\n", lane.name);
    for (const Block& block : lane.blocks) {
      text += fmt::format("    {} x\n", block.trips) + printBlock(plan, block, "      ");
    }
  }
  const Totals sum = totals(plan);
  text += fmt::format("  total: {} steps, {} messages with {} bytes, {} bytes copied, {} reduced\n",
                      sum.steps, sum.messages, sum.bytesPut, sum.bytesCopied, sum.bytesReduced);
  return text;
}

}  // namespace smddp::plan
