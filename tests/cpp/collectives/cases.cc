#include "collectives/cases.h"

#include <ostream>

#include <gtest/gtest.h>

#include "collectives/algorithms.h"
#include "support/effort.h"

namespace smddp::collectives {

const std::vector<NamedAlgorithm>& allAlgorithms() {
  static const std::vector<NamedAlgorithm> all = {
      {"one_shot", Collective::AllReduce, allreduceOneShot, true, false, true},
      {"two_phase", Collective::AllReduce, allreduceTwoPhase, true, false, true},
      {"zero_copy", Collective::AllReduce, allreduceZeroCopy, true, true, true},
      {"recursive_doubling", Collective::AllReduce, allreduceRecursiveDoubling, false, false, true},
      {"halving_doubling", Collective::AllReduce, allreduceHalvingDoubling, false, false, true},
      {"direct", Collective::AllReduce, allreduceDirect, false, false, true},
      {"direct_bf16", Collective::AllReduce, allreduceDirect, false, false, false, Wire::bf16},
      {"direct_int8", Collective::AllReduce, allreduceDirect, false, false, false, Wire::int8},
      {"direct_int8_feedback", Collective::AllReduce, allreduceDirect, false, false, false,
       Wire::int8, true},
      {"ring", Collective::AllReduce, allreduceRing, false, false, false},
      {"shared_memory", Collective::Broadcast, broadcastSharedMemory, true, false, true},
      {"chain", Collective::Broadcast, broadcastChain, false, false, true},
      {"shared_memory", Collective::AllGather, allgatherSharedMemory, true, false, true},
      {"mesh", Collective::AllGather, allgatherMesh, false, false, true},
      {"shared_memory", Collective::ReduceScatter, reduceScatterSharedMemory, true, false, true},
      {"direct", Collective::ReduceScatter, reduceScatterDirect, false, false, true},
      {"direct_bf16", Collective::ReduceScatter, reduceScatterDirect, false, false, false,
       Wire::bf16},
      {"direct_int8_feedback", Collective::ReduceScatter, reduceScatterDirect, false, false, false,
       Wire::int8, true},
      {"one_shot", Collective::Reduce, reduceOneShot, true, false, true},
      {"shared_memory", Collective::Reduce, reduceSharedMemory, true, false, true},
      {"direct", Collective::Reduce, reduceDirect, false, false, true},
      {"direct_bf16", Collective::Reduce, reduceDirect, false, false, false, Wire::bf16},
      {"direct_int8_feedback", Collective::Reduce, reduceDirect, false, false, false, Wire::int8,
       true},
      {"direct", Collective::Gather, gatherDirect, false, false, true},
      {"direct", Collective::Scatter, scatterDirect, false, false, true},
      {"direct", Collective::AllToAll, alltoallDirect, false, false, true},
      {"exchange", Collective::Barrier, barrierExchange, false, false, true},
  };
  return all;
}

std::vector<NamedAlgorithm> halfOf(const std::vector<NamedAlgorithm>& algorithms) {
  const test::Share share = test::shareOf(2);
  std::vector<NamedAlgorithm> taken;
  for (size_t i = 0; i < algorithms.size(); ++i) {
    if (share.has(i)) taken.push_back(algorithms[i]);
  }
  return taken;
}

std::ostream& operator<<(std::ostream& out, const NamedAlgorithm& algorithm) {
  return out << toString(algorithm.collective) << "_" << algorithm.name;
}

plan::Execution Case::execution() const {
  std::vector<plan::Plan> plans;
  int numRanks = 0;
  for (const auto& node : nodes) numRanks += static_cast<int>(node.size());
  for (Rank r = 0; r < numRanks; ++r) {
    const plan::Topology t(nodes, r);
    const bool shared = sharedOnNode[static_cast<size_t>(t.myNode())];
    const bool encodes = nodes.size() > 1;
    plans.push_back(
        algorithm.build(t, limits,
                        {algorithm.collective, bytes, root, shared, false,
                         encodes ? algorithm.wire : Wire::fp32, encodes && algorithm.feedback}));
  }
  plan::Execution execution;
  switch (algorithm.collective) {
    case Collective::AllReduce:
      execution = plan::Execution::allReduce(std::move(plans), bytes);
      break;
    case Collective::Broadcast:
      execution = plan::Execution::broadcast(std::move(plans), bytes, root);
      break;
    case Collective::AllGather:
      execution = plan::Execution::allGather(std::move(plans), bytes);
      break;
    case Collective::ReduceScatter:
      execution = plan::Execution::reduceScatter(std::move(plans), bytes);
      break;
    case Collective::Reduce:
      execution = plan::Execution::reduce(std::move(plans), bytes, root);
      break;
    case Collective::Gather:
      execution = plan::Execution::gather(std::move(plans), bytes, root);
      break;
    case Collective::Scatter:
      execution = plan::Execution::scatter(std::move(plans), bytes, root);
      break;
    case Collective::AllToAll:
      execution = plan::Execution::allToAll(std::move(plans), bytes);
      break;
    case Collective::Barrier: execution = plan::Execution::barrier(std::move(plans)); break;
  }
  execution.hasOneOrder = algorithm.oneOrder;
  execution.elementBytes = kElementBytes;
  return execution;
}

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.algorithm << ", nodes " << testing::PrintToString(c.nodes) << ", shared "
             << testing::PrintToString(c.sharedOnNode)
             << fmt::format(
                    ", {} bytes, root {}; window {}, half {}, chunk {}, fabric chunk {}, "
                    "message {}",
                    c.bytes, c.root, c.limits.window, c.limits.halfBytes, c.limits.chunkBytes,
                    c.limits.fabricChunkBytes, c.limits.messageBytes);
}

std::vector<std::vector<bool>> sharingsOf(const NamedAlgorithm& algorithm, const Nodes& nodes) {
  std::vector<std::vector<bool>> sharings{std::vector<bool>(nodes.size(), true)};
  if (algorithm.needsShared) return sharings;
  sharings.emplace_back(nodes.size(), false);
  if (nodes.size() == 1) return sharings;
  for (const size_t first : {0, 1}) {
    sharings.emplace_back();
    for (size_t n = 0; n < nodes.size(); ++n) sharings.back().push_back((n + first) % 2 == 0);
  }
  return sharings;
}

plan::Limits smallLimits(int64_t window) {
  return {.chunkBytes = 256,
          .fabricChunkBytes = 512,
          .messageBytes = 128,
          .window = window,
          .halfBytes = 32 << 10};
}

plan::Verdict checkRepeated(const Case& c, int times) {
  const std::vector<plan::Execution> executions(static_cast<size_t>(times), c.execution());
  return plan::check(c.nodes, c.limits, executions);
}

}  // namespace smddp::collectives
