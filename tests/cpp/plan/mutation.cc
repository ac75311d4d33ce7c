#include "plan/mutation.h"

#include <fmt/format.h>

#include "plan/builder.h"
#include "plan/print.h"

namespace smddp::plan {
namespace {

// A change to step `i` of a plan. Returns false if it does not apply to that step.
struct Change {
  const char* what;
  std::function<bool(Plan&, size_t i)> apply;
};

bool moves(Op op) { return op == Op::Copy || op == Op::Reduce; }
// Without a post a plan is as right as before.
bool isRemovable(Op op) { return !moves(op) && op != Op::Post; }

// Replaces the step by a wait for 0, which has no effect and keeps the numbers of the other steps.
bool remove(Plan& plan, size_t i) {
  if (!isRemovable(plan.steps[i].op)) return false;
  plan.steps[i] = Step{};
  plan.steps[i].op = Op::Wait;
  plan.steps[i].counter = 1;
  plan.steps[i].firstRef = 0;
  return true;
}

int64_t tripsOf(const Plan& plan, size_t i) {
  for (const Lane& lane : plan.lanes) {
    for (const Block& block : lane.blocks) {
      if (i >= block.firstStep && i < block.firstStep + block.numSteps) return block.trips;
    }
  }
  return 1;
}

// Waits for one less, or signals one more. (In a block with one trip nobody may wait for more.)
bool weaken(Plan& plan, size_t i) {
  Step& step = plan.steps[i];
  if (step.op == Op::Wait || step.op == Op::Flush || step.op == Op::Receive) {
    --step.value.base;
  } else if ((step.op == Op::Signal || step.op == Op::Release) && tripsOf(plan, i) > 1) {
    ++step.value.base;
  } else {
    return false;
  }
  return true;
}

// Moves a signal or release before the copy or reduction that it announces.
bool announceEarly(Plan& plan, size_t i) {
  const Op op = plan.steps[i].op;
  if ((op != Op::Signal && op != Op::Release) || i == 0) return false;
  if (!moves(plan.steps[i - 1].op) || tripsOf(plan, i) != tripsOf(plan, i - 1)) return false;
  std::swap(plan.steps[i], plan.steps[i - 1]);
  return true;
}

// Applies `edit` to reference number `r` of the step if it is a slot or message.
bool editStaged(Plan& plan, size_t i, int r, const std::function<bool(Ref&)>& edit) {
  const Step& step = plan.steps[i];
  if (r >= step.numDestinations + step.numSources) return false;
  Ref& ref = plan.refs[step.firstRef + r];
  return (ref.space == Space::Slot || ref.space == Space::Message) && edit(ref);
}

bool nextIndex(const Plan& plan, Ref& ref) {
  if (ref.space == Space::Slot && plan.pools[ref.poolOrStream].slots == 1) return false;
  ++ref.index.base;
  return true;
}

bool dropSource(Plan& plan, size_t i, int s) {
  Step& step = plan.steps[i];
  if (step.op != Op::Reduce || s >= step.numSources || step.numSources < 2) return false;
  const auto first = plan.refs.begin() + step.firstRef + step.numDestinations;
  std::move(first + s + 1, first + step.numSources + step.hasResidual, first + s);
  --step.numSources;
  return true;
}

// A message that is posted elsewhere overwrites what lies there.
bool shiftPost(Plan& plan, size_t i) {
  const Step& step = plan.steps[i];
  if (step.op != Op::Post) return false;
  plan.refs[step.firstRef].offset.base += kGranule;
  return true;
}

bool shiftResidual(Plan& plan, size_t i) {
  const Step& step = plan.steps[i];
  if (!step.hasResidual) return false;
  plan.refs[step.firstRef + step.numRefs() - 1].offset.base += kGranule;
  return true;
}

std::vector<Change> allChanges(int mostRefs) {
  std::vector<Change> changes{
      {"removed", remove},
      {"off by one", weaken},
      {"announced early", announceEarly},
      {"post shifted", shiftPost},
      {"residual shifted", shiftResidual},
      {"pre-scaling flipped",
       [](Plan& plan, size_t i) {
         Step& step = plan.steps[i];
         return moves(step.op) && ((step.preScale = !step.preScale), true);
       }},
      {"final scaling flipped",
       [](Plan& plan, size_t i) {
         Step& step = plan.steps[i];
         return moves(step.op) && ((step.postScale = !step.postScale), true);
       }},
  };
  for (int r = 0; r < mostRefs; ++r) {
    changes.push_back({"next slot", [r](Plan& plan, size_t i) {
                         return editStaged(plan, i, r,
                                           [&](Ref& ref) { return nextIndex(plan, ref); });
                       }});
    changes.push_back({"another owner", [r](Plan& plan, size_t i) {
                         return editStaged(plan, i, r, [&](Ref& ref) {
                           ref.owner ^= 1;
                           return true;
                         });
                       }});
    changes.push_back(
        {"source dropped", [r](Plan& plan, size_t i) { return dropSource(plan, i, r); }});
  }
  return changes;
}

std::string stageOf(const Plan& plan, size_t i) {
  for (const Lane& lane : plan.lanes) {
    for (const Block& block : lane.blocks) {
      if (i >= block.firstStep && i < block.firstStep + block.numSteps) return lane.name;
    }
  }
  return "preamble";
}

// Makes the change on every rank whose plan has the same operation at this place.
std::vector<Plan> onAllRanks(const std::vector<Plan>& plans, Rank like, size_t i,
                             const Change& change) {
  std::vector<Plan> mutated = plans;
  for (size_t r = 0; r < plans.size(); ++r) {
    const bool isAlike = i < plans[r].steps.size() &&
                         plans[r].steps[i].op == plans[like].steps[i].op &&
                         stageOf(plans[r], i) == stageOf(plans[like], i);
    if (isAlike && !change.apply(mutated[r], i)) mutated[r] = plans[r];
  }
  return mutated;
}

}  // namespace

void forEachMutation(
    const std::vector<std::vector<Rank>>& nodes, const std::vector<Plan>& plans,
    const std::function<void(const std::string& what, std::vector<Plan> mutated)>& visit) {
  const Topology topology(nodes, 0);
  int mostRefs = 0;
  for (const Plan& plan : plans) {
    for (const Step& step : plan.steps) {
      mostRefs = std::max(mostRefs, step.numDestinations + step.numSources);
    }
  }
  for (const Change& change : allChanges(mostRefs)) {
    for (Rank r = 0; r < static_cast<Rank>(plans.size()); ++r) {
      const bool isAlone = topology.node(topology.nodeOf(r)).size() == 1;
      for (size_t i = 0; i < plans[r].steps.size(); ++i) {
        const Step& step = plans[r].steps[i];
        if (isAlone && step.op == Op::Wait && step.who == kMates) continue;
        std::vector<Plan> mutated = plans;
        if (!change.apply(mutated[r], i)) continue;
        const std::string what = fmt::format("stage {}, {}: {}", stageOf(plans[r], i),
                                             printStep(plans[r], step), change.what);
        visit(fmt::format("rank {}, {}", r, what), std::move(mutated));
        if (r == 0 && plans.size() > 1)
          visit("all ranks, " + what, onAllRanks(plans, r, i, change));
      }
    }
  }
}

std::string MutationReport::print() const {
  std::string text = fmt::format("{} of {} mutations found\n", found, tried);
  for (const std::string& survivor : survivors) text += fmt::format("  alive: {}\n", survivor);
  return text;
}

MutationReport checkMutations(const std::vector<std::vector<Rank>>& nodes, const Limits& limits,
                              const Execution& execution, int times) {
  MutationReport report;
  forEachMutation(nodes, execution.plans, [&](const std::string& what, std::vector<Plan> mutated) {
    Execution one = execution;
    one.plans = std::move(mutated);
    const std::vector<Execution> backToBack(static_cast<size_t>(times), one);
    ++report.tried;
    if (check(nodes, limits, backToBack).ok()) {
      report.survivors.push_back(what);
    } else {
      ++report.found;
    }
  });
  return report;
}

}  // namespace smddp::plan
