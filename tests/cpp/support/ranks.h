// N ranks of a group as threads of one process, each with an engine of its own.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/config.h"
#include "engine/engine.h"
#include "support/local_store.h"

namespace smddp::test {

inline constexpr Nanoseconds kTimeout = 60'000'000'000;

// The arguments of a rank's body.
struct RankContext {
  Rank rank;
  int size;
  LocalStore& store;
  engine::Engine& engine;
  std::shared_ptr<engine::groups::Group> group;

  // Runs a collective and waits for it; throws its error.
  void run(engine::calls::Request request) const {
    request.willWait = true;
    if (request.timeout == 0) request.timeout = kTimeout;
    const auto completion = engine.submit(*group, std::move(request));
    if (completion->error()) throw *completion->error();
  }
};

// Runs `body` on every rank, and rethrows the exception of the first rank that fails. layout[n] is the number of ranks
// on node n: {2, 2} is two nodes of two ranks. Engines live until all bodies have ended. `prepare` runs on the thread
// of each rank before its engine is made, with these options.
inline void runRanks(
    const std::vector<int>& layout, const std::function<void(RankContext&)>& body,
    const std::function<void(Rank, engine::Engine::Options&)>& prepare =
        [](Rank, engine::Engine::Options&) {}) {
  std::vector<std::string> nodes;
  for (size_t n = 0; n < layout.size(); ++n) {
    for (int i = 0; i < layout[n]; ++i) nodes.push_back("node" + std::to_string(n));
  }
  const int size = static_cast<int>(nodes.size());
  LocalStore store;
  std::vector<std::exception_ptr> errors(nodes.size());
  std::vector<std::unique_ptr<engine::Engine>> engines(nodes.size());
  std::vector<std::thread> threads;
  for (Rank rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        engine::Engine::Options options;
        options.process.settings.nodeId = nodes[rank];
        // All ranks share one address space, of which ThreadSanitizer leaves little.
        options.process.slabBytes = size_t{16} << 30;
        prepare(rank, options);
        engines[rank] = std::make_unique<engine::Engine>(options);
        RankContext context{rank, size, store, *engines[rank], nullptr};
        context.group = engines[rank]->createGroup(store, {"test", rank, size}, kTimeout);
        body(context);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  // All ranks leave before any waits for the others to have left.
  threads.clear();
  for (auto& engine : engines) {
    threads.emplace_back([&] { engine.reset(); });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

// A layout, and the settings of all ranks: the parameter of tests that run with several.
struct Job {
  std::vector<int> layout;
  Settings settings;
};

inline std::vector<Job> jobsOf(
    const std::vector<std::vector<int>>& layouts,
    const std::function<void(Settings&)>& change = [](Settings&) {}) {
  std::vector<Job> jobs;
  for (const auto& layout : layouts) change(jobs.emplace_back(Job{layout, {}}).settings);
  return jobs;
}

// "nodes_2_1"
inline std::string nameOf(const Job& job) {
  std::string name = "nodes";
  for (const int ranks : job.layout) name += "_" + std::to_string(ranks);
  return name;
}
inline void PrintTo(const Job& job, std::ostream* out) { *out << nameOf(job); }

inline void runRanks(const Job& job, const std::function<void(RankContext&)>& body) {
  runRanks(job.layout, body, [&](Rank, engine::Engine::Options& options) {
    std::string node = std::move(options.process.settings.nodeId);
    options.process.settings = job.settings;
    options.process.settings.nodeId = std::move(node);
  });
}

}  // namespace smddp::test
