// One run of the simulator: a few ranks, their engines and groups on a SimNetwork, and a random program of
// collectives for each group. Everything follows from one seed, and one thread runs it on a virtual clock.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/calls.h"
#include "transport/sim/network.h"
#include "transport/sim/random.h"

namespace smddp::test {

using transport::sim::Faults;
using transport::sim::Random;
using transport::sim::SimNetwork;

class Simulation {
 public:
  // The faults that a run may have.
  enum class Trouble {
    None,       // no fault: every result must be right
    Drop,       // puts or control messages get lost
    Partition,  // two endpoints do not reach each other for a while, or for ever
    Kill,       // a rank stops
    All,        // any of these
  };
  static constexpr Nanoseconds kTimeout = 50'000'000;

  // `algorithm`: SMDDP_ALGORITHM.
  Simulation(uint64_t seed, Trouble trouble, std::string algorithm = "");
  // Runs until every call of every living rank has ended. Failures are gtest failures.
  void run();
  // A record of all events on the network, and of how and when every call ended.
  std::string trace() const { return trace_ + fmt::format("digest {:016x}", network_.digest()); }
  int numErrors() const { return numErrors_; }
  std::string describe() const;

 private:
  struct Call {
    Collective collective;
    ReduceOp op;
    Rank root;
    size_t count;           // of elements
    bool isFloat = false;   // a sum of float32; else int32
    std::string_view wire;  // of the group: SMDDP_WIRE
    bool again = false;     // the call before it, a second time on the same memory
  };
  // A rank in one group, with its calls.
  struct Seat {
    std::shared_ptr<engine::groups::Group> group;
    Rank me = 0;
    int size = 0;
    const std::vector<Call>* program = nullptr;
    std::vector<std::vector<int32_t>> inputs, outputs;  // of float32: their bits
    std::vector<engine::calls::CompletionPtr> completions;
    std::vector<Nanoseconds> deadlines;
    size_t ended = 0;  // the number of calls that have ended and were checked
  };
  struct Player {
    std::unique_ptr<engine::Engine> engine;
    std::vector<std::unique_ptr<Seat>> seats;
    bool dead = false;
  };

  void makePlayers();
  void makeGroup(const std::string& name, const std::vector<Rank>& members);
  std::vector<Call> randomProgram(int size);
  void planTrouble();
  // The number of a rank's card on the network.
  int endpointOf(int rank, int card) const { return rank * numCards_ + card; }
  void submitNext(Player& player, Seat& seat);
  void look(Seat& seat);
  std::string describe(const Seat& seat, size_t number) const;
  void requireSums(const Seat& seat, size_t number);
  bool mayHave(Trouble trouble) const { return trouble_ == trouble || trouble_ == Trouble::All; }
  void tick();
  bool finished() const;
  static int32_t value(const Call& call, size_t number, Rank rank, size_t element);
  static float floatValue(const Call& call, size_t number, Rank rank, size_t element);
  static std::vector<int32_t> expected(const Call& call, size_t number, Rank me, int size);
  static bool isRepeated(const std::vector<Call>& program, size_t number);
  static size_t memoryOf(const std::vector<Call>& program, size_t number);

  const uint64_t seed_;
  const Trouble trouble_;
  const std::string algorithm_;
  Random random_;
  SimNetwork network_;
  std::vector<std::string> nodes_;  // by rank
  int numCards_ = 1;                // of every rank
  std::vector<std::unique_ptr<std::vector<Call>>> programs_;
  // By program and number of the call: the output of the first rank whose allreduce of float32 has ended.
  std::map<std::pair<const std::vector<Call>*, size_t>, std::vector<int32_t>> firstOutputs_;
  std::vector<Player> players_;
  std::string trace_;
  int numErrors_ = 0;
};

}  // namespace smddp::test
