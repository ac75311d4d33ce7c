// Random programs on random layouts over the simulated network. To repeat one seed of one test:
//   SIMULATION_SEED=17 simulation_test --gtest_filter=*Kill*
// 11 000 seeds, 5 ms each; ctest runs them as several tests. A run takes a part of the seeds of each test: another
// part with each TEST_TURN, or all of them with ALL_SEEDS=1.
#include "engine/simulation.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <set>

#include "support/effort.h"
#include "support/watchdog.h"

namespace smddp::test {
namespace {

using Trouble = Simulation::Trouble;

constexpr uint64_t kParts = kSanitized ? 20 : 4;

class SimulationTest : public testing::Test {
 protected:
  explicit SimulationTest(std::string algorithm = "") : algorithm_(std::move(algorithm)) {}

  // Stops at the first seed that fails. Returns the number of calls that ended with an error.
  int runSeeds(uint64_t first, uint64_t count, Trouble trouble) {
    Share share = shareOf(kParts);
    if (const char* one = std::getenv("SIMULATION_SEED"))
      first = std::strtoull(one, nullptr, 10), count = 1, share = {};
    fmt::print("seeds {} to {}, every {}th\n", first + share.first, first + count - 1, share.step);
    int numErrors = 0;
    for (uint64_t seed = first + share.first; seed < first + count && !HasFailure();
         seed += share.step) {
      watchdog_.restart();
      Simulation simulation(seed, trouble, algorithm_);
      SCOPED_TRACE(fmt::format("SIMULATION_SEED={}: {}", seed, simulation.describe()));
      simulation.run();
      numErrors += simulation.numErrors();
    }
    return numErrors;
  }

  void requireSameTraces() {
    std::set<std::string> different;
    uint64_t seed = 40'000;
    for (const Trouble trouble :
         {Trouble::None, Trouble::Drop, Trouble::Partition, Trouble::Kill, Trouble::All}) {
      for (int i = 0; i < 10; ++i) {
        watchdog_.restart();
        ++seed;
        SCOPED_TRACE(seed);
        std::string traces[2];
        for (std::string& trace : traces) {
          Simulation simulation(seed, trouble, algorithm_);
          simulation.run();
          trace = simulation.trace();
        }
        EXPECT_EQ(traces[0], traces[1]);
        different.insert(traces[0]);
      }
    }
    EXPECT_EQ(different.size(), 50u);
  }

 private:
  const std::string algorithm_;
  Watchdog watchdog_;
};

// Delays, reordering, repeated completions and refusals must not change any result.
TEST_F(SimulationTest, HarmlessNetwork) { runSeeds(1, 3000, Trouble::None); }

// In the following tests some calls must fail, or nothing was tested.
TEST_F(SimulationTest, LostMessages) { EXPECT_GT(runSeeds(10'001, 2000, Trouble::Drop), 0); }
TEST_F(SimulationTest, PartitionedNetwork) {
  EXPECT_GT(runSeeds(20'001, 2000, Trouble::Partition), 0);
}
TEST_F(SimulationTest, KilledRank) { EXPECT_GT(runSeeds(30'001, 2000, Trouble::Kill), 0); }
TEST_F(SimulationTest, AllAtOnce) { EXPECT_GT(runSeeds(50'001, 2000, Trouble::All), 0); }

TEST_F(SimulationTest, TheSameSeedGivesTheSameTrace) { requireSameTraces(); }

// The table does not choose these for small groups.
class AlgorithmSimulationTest : public SimulationTest,
                                public testing::WithParamInterface<std::string> {
 protected:
  AlgorithmSimulationTest() : SimulationTest("allreduce=" + GetParam()) {}
};
INSTANTIATE_TEST_SUITE_P(Algorithms, AlgorithmSimulationTest,
                         testing::Values("ring", "halving_doubling"),
                         [](const auto& info) { return info.param; });

TEST_P(AlgorithmSimulationTest, AllAtOnce) { EXPECT_GT(runSeeds(50'001, 2000, Trouble::All), 0); }
TEST_P(AlgorithmSimulationTest, TheSameSeedGivesTheSameTrace) { requireSameTraces(); }

}  // namespace
}  // namespace smddp::test
