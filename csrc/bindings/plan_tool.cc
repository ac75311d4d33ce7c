#include "bindings/plan_tool.h"

#include <pybind11/stl.h>

#include "collectives/selection.h"
#include "engine/plans/limits.h"
#include "plan/checker.h"
#include "plan/print.h"
#include "process_group/errors.h"

namespace py = pybind11;

namespace smddp::bindings {
namespace {

using collectives::Collective;
using collectives::Shape;
using Nodes = std::vector<std::vector<Rank>>;

Collective collectiveNamed(const std::string& name) {
  std::string names;
  for (int i = 0; i < collectives::kNumCollectives; ++i) {
    const auto collective = static_cast<Collective>(i);
    if (name == toString(collective)) return collective;
    names += (i == 0 ? "" : ", ") + std::string(toString(collective));
  }
  raise(ErrorKind::Usage, "\"{}\" is not a collective; use one of {}", name, names);
}

plan::Plan build(const std::string& collective, int64_t bytes, const Nodes& nodes, Rank rank,
                 Rank root, bool shared, const std::string& algorithm, const std::string& wire) {
  const plan::Topology topology(nodes, rank);
  Shape shape{collectiveNamed(collective), bytes, root, shared};
  const WireOption asked = parseWire(wire, "--wire");
  shape.wire =
      collectives::encodedAs(topology, shape.collective, bytes, asked.wire.value_or(Wire::fp32));
  shape.feedback = asked.feedback && shape.wire != Wire::fp32;
  const plan::Limits allowed = engine::plans::limitsFrom(settings());
  const int64_t oneShot = settings().oneShotBytes;
  const auto& choice =
      algorithm.empty()
          ? collectives::select(topology, allowed, shape, oneShot, settings().algorithm,
                                "SMDDP_ALGORITHM", collectives::Tuning::read(settings().tuningFile))
          : collectives::select(topology, allowed, shape, oneShot, collective + "=" + algorithm,
                                "--algorithm");
  return choice.build(topology, allowed, shape);
}

plan::Execution execution(const std::string& collective, int64_t bytes, Rank root,
                          std::vector<plan::Plan> plans) {
  switch (collectiveNamed(collective)) {
    case Collective::AllReduce: return plan::Execution::allReduce(std::move(plans), bytes);
    case Collective::Broadcast: return plan::Execution::broadcast(std::move(plans), bytes, root);
    case Collective::AllGather: return plan::Execution::allGather(std::move(plans), bytes);
    case Collective::ReduceScatter: return plan::Execution::reduceScatter(std::move(plans), bytes);
    case Collective::Reduce: return plan::Execution::reduce(std::move(plans), bytes, root);
    case Collective::Gather: return plan::Execution::gather(std::move(plans), bytes, root);
    case Collective::Scatter: return plan::Execution::scatter(std::move(plans), bytes, root);
    case Collective::AllToAll: return plan::Execution::allToAll(std::move(plans), bytes);
    case Collective::Barrier: break;
  }
  return plan::Execution::barrier(std::move(plans));
}

std::string printPlan(const std::string& collective, int64_t bytes, const Nodes& nodes, Rank rank,
                      Rank root, bool shared, const std::string& algorithm,
                      const std::string& wire) {
  return process_group::translated([&] {
    return plan::print(build(collective, bytes, nodes, rank, root, shared, algorithm, wire),
                       plan::Topology(nodes, rank));
  });
}

// Returns an empty text if the checker proves the plans of all ranks, run three times in a row; otherwise the problem.
std::string checkPlan(const std::string& collective, int64_t bytes, const Nodes& nodes, Rank root,
                      bool shared, const std::string& algorithm, const std::string& wire) {
  return process_group::translated([&] {
    std::vector<plan::Plan> plans;
    int ranks = 0;
    for (const auto& node : nodes) ranks += static_cast<int>(node.size());
    for (Rank rank = 0; rank < ranks; ++rank) {
      plans.push_back(build(collective, bytes, nodes, rank, root, shared, algorithm, wire));
    }
    const std::vector<plan::Execution> three(3, execution(collective, bytes, root, plans));
    const plan::Verdict verdict = plan::check(nodes, engine::plans::limitsFrom(settings()), three);
    return verdict.ok() ? std::string() : verdict.problem;
  });
}

}  // namespace

void bindPlanTool(py::module& m) {
  m.def("list_algorithms", [] {
    std::vector<std::tuple<std::string, std::string, std::string, std::string>> rows;
    for (const auto& row : collectives::listAlgorithms()) {
      rows.emplace_back(toString(row.collective), row.name, row.serves, row.chosen);
    }
    return rows;
  });
  m.def("print_plan", &printPlan, py::arg("collective"), py::arg("bytes"), py::arg("nodes"),
        py::arg("rank"), py::arg("root"), py::arg("shared"), py::arg("algorithm"), py::arg("wire"));
  m.def("check_plan", &checkPlan, py::arg("collective"), py::arg("bytes"), py::arg("nodes"),
        py::arg("root"), py::arg("shared"), py::arg("algorithm"), py::arg("wire"),
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace smddp::bindings
