// Random programs on random layouts over a network that does what it may. To repeat one seed of one test:
//   SIMULATION_SEED=17 simulation_test --gtest_filter=*Kill*
#include "engine/simulation.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "support/watchdog.h"

namespace smddp::test {
namespace {

using Trouble = Simulation::Trouble;

class SimulationTest : public testing::Test {
 protected:
  // Stops at the first seed that fails. Returns how many calls ended with an error.
  int runSeeds(uint64_t first, uint64_t count, Trouble trouble) {
    uint64_t last = first + count - 1;
    if (const char* one = std::getenv("SIMULATION_SEED"))
      first = last = std::strtoull(one, nullptr, 10);
    int numErrors = 0;
    for (uint64_t seed = first; seed <= last && !HasFailure(); ++seed) {
      Simulation simulation(seed, trouble);
      SCOPED_TRACE(fmt::format("SIMULATION_SEED={}: {}", seed, simulation.describe()));
      simulation.run();
      numErrors += simulation.numErrors();
    }
    return numErrors;
  }

 private:
  Watchdog watchdog_{110};
};

// Delays, overtaking, repeated completions and refusals change nothing.
TEST_F(SimulationTest, HarmlessNetwork) { runSeeds(1, 600, Trouble::None); }

// What follows must have gone wrong at times, or nothing was tested.
TEST_F(SimulationTest, LostMessages) { EXPECT_GT(runSeeds(10'001, 150, Trouble::Drop), 0); }
TEST_F(SimulationTest, PartitionedNetwork) {
  EXPECT_GT(runSeeds(20'001, 150, Trouble::Partition), 0);
}
TEST_F(SimulationTest, KilledRank) { EXPECT_GT(runSeeds(30'001, 150, Trouble::Kill), 0); }

TEST_F(SimulationTest, TheSameSeedGivesTheSameEvents) {
  std::set<uint64_t> different;
  for (const Trouble trouble : {Trouble::None, Trouble::Drop, Trouble::Partition, Trouble::Kill}) {
    for (uint64_t seed = 40'001; seed <= 40'005; ++seed) {
      SCOPED_TRACE(seed);
      uint64_t digests[2];
      for (uint64_t& digest : digests) {
        Simulation simulation(seed, trouble);
        simulation.run();
        digest = simulation.digest();
      }
      EXPECT_EQ(digests[0], digests[1]);
      different.insert(digests[0]);
    }
  }
  EXPECT_GT(different.size(), 10u);
}

}  // namespace
}  // namespace smddp::test
