#include "engine/simulation.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>

#include "support/small_settings.h"
#include "transport/sim/sim_transport.h"
#include "transport/striped_transport.h"

namespace smddp::test {
namespace {

class SimClock final : public Clock {
 public:
  explicit SimClock(const SimNetwork& network) : network_(network) {}
  Nanoseconds now() const override { return network_.clock().now(); }

 private:
  const SimNetwork& network_;
};

// Far more turns than any run takes: a run that reaches this makes no progress.
constexpr int kMaxTurns = 200'000;
constexpr Nanoseconds kTick = 200'000;

Faults randomFaults(Random& random, Simulation::Trouble trouble) {
  Faults faults;
  faults.maxDelay = random.between(1'000, 100'000);
  faults.reorder = random.chance(0.7);
  faults.duplicate = random.chance(0.5) ? 0.1 : 0;
  faults.refuse = random.chance(0.5) ? 0.2 : 0;
  const bool drops = trouble == Simulation::Trouble::Drop ||
                     (trouble == Simulation::Trouble::All && random.chance(0.5));
  faults.drop = drops ? 0.01 : 0;
  return faults;
}

}  // namespace

Simulation::Simulation(uint64_t seed, Trouble trouble, std::string algorithm)
    : seed_(seed),
      trouble_(trouble),
      algorithm_(std::move(algorithm)),
      random_(seed),
      network_(seed, randomFaults(random_, trouble)) {
  // Most groups are small, because most faults between many ranks also occur between few.
  const int size = static_cast<int>(random_.between(2, random_.chance(0.25) ? 7 : 4));
  const int numNodes = static_cast<int>(random_.between(1, std::min(size, 5)));
  for (Rank r = 0; r < size; ++r) {
    nodes_.push_back(fmt::format("{}", r < numNodes ? r : random_.between(0, numNodes - 1)));
  }
  if (random_.chance(0.3)) numCards_ = 2;
  makePlayers();
  std::vector<Rank> world;
  for (Rank r = 0; r < size; ++r) world.push_back(r);
  makeGroup("world", world);
  for (int64_t i = random_.between(0, 2); i > 0; --i) {
    std::vector<Rank> some;
    for (Rank r = 0; r < size; ++r) {
      if (random_.chance(0.6)) some.insert(some.begin() + random_.between(0, some.size()), r);
    }
    if (!some.empty()) makeGroup(fmt::format("part {}", i), some);
  }
  planTrouble();
}

void Simulation::makePlayers() {
  for (size_t rank = 0; rank < nodes_.size(); ++rank) {
    engine::Engine::Options options;
    options.progressThread = false;
    options.process.clock = std::make_shared<SimClock>(network_);
    options.process.fabric = [this, rank]() -> std::unique_ptr<transport::Transport> {
      if (numCards_ == 1) return network_.create(fmt::format("rank {}", rank));
      std::vector<std::unique_ptr<transport::Transport>> cards;
      for (int card = 0; card < numCards_; ++card) {
        cards.push_back(network_.create(fmt::format("card {} of rank {}", card, rank)));
      }
      return std::make_unique<transport::StripedTransport>(std::move(cards));
    };
    options.process.id.emplace();
    for (auto& byte : *options.process.id) byte = static_cast<std::byte>(random_.next());
    options.process.settings = smallSettings();
    options.process.settings.nodeId = nodes_[rank];
    options.process.settings.algorithm = algorithm_;
    options.process.slabBytes = size_t{64} << 20;
    options.process.lifelines = false;
    Player player;
    player.engine = std::make_unique<engine::Engine>(options);
    player.engine->progress().call(
        [&] { player.engine->process().openFabric(nodes_.size(), "127.0.0.1"); });
    players_.push_back(std::move(player));
  }
}

void Simulation::makeGroup(const std::string& name, const std::vector<Rank>& members) {
  const int size = static_cast<int>(members.size());
  constexpr std::array kWires{"fp32", "bf16", "int8", "int8+feedback"};
  // Other algorithms than the built-in choice know no formats.
  const bool encodes = algorithm_.empty();
  const char* const wire = kWires[encodes ? (seed_ + programs_.size()) % kWires.size() : 0];
  programs_.push_back(std::make_unique<std::vector<Call>>(randomProgram(size)));
  for (size_t number = 0; number < programs_.back()->size(); ++number) {
    Call& call = (*programs_.back())[number];
    const bool isSum = collectives::isReduction(call.collective) && call.op == ReduceOp::SUM;
    const bool isAlone = !call.again && !isRepeated(*programs_.back(), number);
    call.isFloat = isSum && isAlone && (seed_ + number) % 3 != 0;
    call.wire = wire;
  }
  std::vector<engine::groups::Place> places;
  engine::groups::Members all;
  std::vector<Seat*> seats;
  for (Rank me = 0; me < size; ++me) {
    Player& player = players_[static_cast<size_t>(members[static_cast<size_t>(me)])];
    auto seat = std::make_unique<Seat>();
    places.push_back(player.engine->reserve(
        {.name = name, .me = me, .size = size, .options = {.algorithm = "", .wire = wire}}));
    seat->me = me;
    seat->size = size;
    seat->program = programs_.back().get();
    // Operations refer to these buffers, so they must not move.
    seat->inputs.resize(seat->program->size());
    seat->outputs.resize(seat->program->size());
    all.introductions.push_back(places.back().introduction);
    all.nodeOfRank.push_back(nodes_[static_cast<size_t>(members[static_cast<size_t>(me)])]);
    seats.push_back(seat.get());
    player.seats.push_back(std::move(seat));
  }
  for (Rank me = 0; me < size; ++me) {
    Player& player = players_[static_cast<size_t>(members[static_cast<size_t>(me)])];
    const auto number = static_cast<size_t>(me);
    seats[number]->group = player.engine->join(places[number], all);
  }
}

std::vector<Simulation::Call> Simulation::randomProgram(int size) {
  std::vector<Call> program(static_cast<size_t>(random_.between(2, random_.chance(0.2) ? 12 : 4)));
  for (size_t number = 0; number < program.size(); ++number) {
    Call& call = program[number];
    if (number > 0 && program[number - 1].collective == Collective::AllReduce &&
        random_.chance(0.3)) {
      call = program[number - 1];
      call.again = true;
      continue;
    }
    // Half of the calls are allreduces; half of these are small enough to be fused.
    call.collective =
        random_.chance(0.5)
            ? Collective::AllReduce
            : static_cast<Collective>(random_.between(0, collectives::kNumCollectives - 1));
    call.op = random_.chance(0.8) ? ReduceOp::SUM : ReduceOp::MAX;
    call.root = static_cast<Rank>(random_.between(0, size - 1));
    const int64_t most = random_.chance(0.5) ? 40 : random_.chance(0.5) ? 700 : 4000;
    call.count = static_cast<size_t>(random_.between(0, most));
  }
  return program;
}

void Simulation::planTrouble() {
  const auto numRanks = static_cast<int>(players_.size());
  const auto any = [&] { return static_cast<int>(random_.between(0, numRanks - 1)); };
  if (mayHave(Trouble::Partition)) {
    const Nanoseconds when = random_.between(0, 500'000);
    const int a = any();
    const int b = (a + 1 + static_cast<int>(random_.between(0, numRanks - 2))) % numRanks;
    const auto outage =
        random_.chance(0.5) ? transport::sim::Outage::Hold : transport::sim::Outage::Drop;
    const bool heals = random_.chance(0.5);
    const Nanoseconds until =
        heals ? when + random_.between(1, 2 * kTimeout) : SimNetwork::kForever;
    // If there are several cards, all fail, or one.
    const int last = static_cast<int>(random_.between(0, numCards_ - 1));
    for (int card = random_.chance(0.5) ? 0 : last; card <= last; ++card) {
      network_.partition(endpointOf(a, card), endpointOf(b, card), when, until, outage);
    }
  }
  if (mayHave(Trouble::Kill)) {
    const int victim = any();
    std::optional<Nanoseconds> detection;
    if (random_.chance(0.7)) detection = random_.between(0, kTimeout / 2);
    network_.at(random_.between(0, 500'000), [this, victim, detection] {
      for (int card = 0; card < numCards_; ++card) {
        network_.kill(endpointOf(victim, card), detection);
      }
      players_[static_cast<size_t>(victim)].dead = true;
    });
  }
}

bool Simulation::isRepeated(const std::vector<Call>& program, size_t number) {
  return number + 1 < program.size() && program[number + 1].again;
}

// The call whose output the call uses: itself, or the one that it repeats.
size_t Simulation::memoryOf(const std::vector<Call>& program, size_t number) {
  while (program[number].again) --number;
  return number;
}

float Simulation::floatValue(const Call& call, size_t number, Rank rank, size_t element) {
  const size_t mixed = number * 1'000'003 + static_cast<size_t>(rank) * 7919 + element * 311;
  return static_cast<float>((mixed + call.count) % 2001) - 1000;
}

int32_t Simulation::value(const Call& call, size_t number, Rank rank, size_t element) {
  if (call.isFloat) return std::bit_cast<int32_t>(floatValue(call, number, rank, element));
  return static_cast<int32_t>(number * 1'000'003 + static_cast<size_t>(rank) * 7919 + element * 31 +
                              call.count);
}

// The output that the rank must have.
std::vector<int32_t> Simulation::expected(const Call& call, size_t number, Rank me, int size) {
  const auto reduced = [&](size_t element) {
    if (call.isFloat) {
      // Whole numbers, so the sum is exact.
      float sum = 0;
      for (Rank r = 0; r < size; ++r) sum += floatValue(call, number, r, element);
      return std::bit_cast<int32_t>(sum);
    }
    int32_t result = value(call, number, 0, element);
    for (Rank r = 1; r < size; ++r) {
      const int32_t next = value(call, number, r, element);
      result = call.op == ReduceOp::SUM ? result + next : std::max(result, next);
    }
    return result;
  };
  std::vector<int32_t> result;
  switch (call.collective) {
    case Collective::AllReduce:
      for (size_t i = 0; i < call.count; ++i) result.push_back(reduced(i));
      break;
    case Collective::Broadcast:
      for (size_t i = 0; i < call.count; ++i) result.push_back(value(call, number, call.root, i));
      break;
    case Collective::AllGather:
      for (Rank r = 0; r < size; ++r) {
        for (size_t i = 0; i < call.count; ++i) result.push_back(value(call, number, r, i));
      }
      break;
    case Collective::ReduceScatter:
      for (size_t i = 0; i < call.count; ++i) {
        result.push_back(reduced(static_cast<size_t>(me) * call.count + i));
      }
      break;
    case Collective::Reduce:
      // In place at the root, untouched elsewhere.
      for (size_t i = 0; i < call.count; ++i) {
        result.push_back(me == call.root ? reduced(i) : value(call, number, me, i));
      }
      break;
    case Collective::Gather:
      for (Rank r = 0; me == call.root && r < size; ++r) {
        for (size_t i = 0; i < call.count; ++i) result.push_back(value(call, number, r, i));
      }
      break;
    case Collective::Scatter:
      for (size_t i = 0; i < call.count; ++i) {
        result.push_back(value(call, number, call.root, static_cast<size_t>(me) * call.count + i));
      }
      break;
    case Collective::AllToAll:
      for (Rank r = 0; r < size; ++r) {
        for (size_t i = 0; i < call.count; ++i) {
          result.push_back(value(call, number, r, static_cast<size_t>(me) * call.count + i));
        }
      }
      break;
    case Collective::Barrier: break;
  }
  return result;
}

void Simulation::submitNext(Player& player, Seat& seat) {
  const size_t number = seat.completions.size();
  const Call& call = (*seat.program)[number];
  auto& input = seat.inputs[number];
  auto& output = seat.outputs[memoryOf(*seat.program, number)];
  const auto ranks = static_cast<size_t>(seat.size);
  const bool isRoot = seat.me == call.root;
  const auto count = static_cast<int64_t>(call.count);
  const auto inputs =
      collectives::buffersOf({call.collective, count, call.root}, seat.me, seat.size)
          .inputBytes;  // elements
  for (size_t i = 0; i < static_cast<size_t>(inputs); ++i)
    input.push_back(value(call, number, seat.me, i));
  const DataType type = call.isFloat ? DataType::float32 : DataType::int32;
  engine::calls::Request request;
  switch (call.collective) {
    case Collective::AllReduce:
      if (!call.again) output = input;
      request = allReduce(bytesOf(output), type, call.op);
      break;
    case Collective::Broadcast:
      output = isRoot ? input : std::vector<int32_t>(call.count, -1);
      request = broadcast(bytesOf(output), call.root);
      break;
    case Collective::AllGather:
      output.assign(call.count * ranks, -1);
      request = allGather(bytesOf(input), {bytesOf(output)});
      break;
    case Collective::ReduceScatter:
      output.assign(call.count, -1);
      request = reduceScatter({bytesOf(input)}, bytesOf(output), type, call.op);
      break;
    case Collective::Reduce:
      output = input;
      request = reduce(bytesOf(output), call.root, isRoot, type, call.op);
      break;
    case Collective::Gather:
      if (isRoot) output.assign(call.count * ranks, -1);
      request = gather(bytesOf(input), {bytesOf(output)}, call.root);
      break;
    case Collective::Scatter:
      output.assign(call.count, -1);
      request = scatter({bytesOf(input)}, bytesOf(output), call.root);
      break;
    case Collective::AllToAll:
      output.assign(call.count * ranks, -1);
      request = allToAll({bytesOf(input)}, {bytesOf(output)}, call.count * sizeof(int32_t));
      break;
    case Collective::Barrier: request = barrier(); break;
  }
  if (seat.group->feedsBack(request))
    request.residual = std::make_shared<float[]>(static_cast<size_t>(inputs));
  request.timeout = kTimeout;
  seat.deadlines.push_back(network_.clock().now() + kTimeout);
  seat.completions.push_back(player.engine->submit(*seat.group, std::move(request)));
}

// Checks calls that have ended, and that no call is later than its deadline.
void Simulation::look(Seat& seat) {
  for (; seat.ended < seat.completions.size(); ++seat.ended) {
    const size_t number = seat.ended;
    const auto& completion = *seat.completions[number];
    if (!completion.done()) {
      EXPECT_LE(network_.clock().now(), seat.deadlines[number] + 10 * kTick)
          << describe(seat, number) << " is late";
      return;
    }
    const auto& error = completion.error();
    trace_ += fmt::format("{} {}: {}\n", network_.clock().now(), describe(seat, number),
                          error ? error->what() : "done");
    if (error) {
      ++numErrors_;
      EXPECT_NE(trouble_, Trouble::None) << describe(seat, number) << ": " << error->what();
      EXPECT_TRUE(error->kind() == ErrorKind::Timeout || error->kind() == ErrorKind::PeerLost)
          << describe(seat, number) << ": " << error->what();
    } else if ((*seat.program)[number].isFloat) {
      requireSums(seat, number);
    } else if (!isRepeated(*seat.program, number)) {
      const size_t first = memoryOf(*seat.program, number);
      const Call& call = (*seat.program)[first];
      std::vector<int32_t> right = expected(call, first, seat.me, seat.size);
      // All ranks have the result of the call before: its sum is that many times as much, its maximum the same.
      for (size_t again = first; again < number && call.op == ReduceOp::SUM; ++again) {
        for (int32_t& value : right) value *= seat.size;
      }
      EXPECT_EQ(seat.outputs[first], right) << describe(seat, number);
    }
  }
}

// Sums of float32 may be encoded: then each contribution is off by at most one step of its format, and so is the
// result.
// All ranks have the same bits.
void Simulation::requireSums(const Seat& seat, size_t number) {
  const Call& call = (*seat.program)[number];
  const auto& output = seat.outputs[number];
  const std::vector<int32_t> right = expected(call, number, seat.me, seat.size);
  ASSERT_EQ(output.size(), right.size()) << describe(seat, number);
  const bool isEncoded = seat.group->membership.spansNodes() && call.wire != "fp32" &&
                         call.count * sizeof(float) > (8 << 10);
  const float step = !isEncoded ? 0 : call.wire == "bf16" ? 0x1p-8f : 0.5f / 127;
  const float bound = 1.01f * step * 2 * 1000 * static_cast<float>(seat.size);
  for (size_t i = 0; i < output.size(); ++i) {
    const float wrongBy = std::bit_cast<float>(output[i]) - std::bit_cast<float>(right[i]);
    ASSERT_LE(std::abs(wrongBy), bound) << describe(seat, number) << ", element " << i;
  }
  if (call.collective != Collective::AllReduce) return;
  const auto& first = firstOutputs_.try_emplace({seat.program, number}, output).first->second;
  EXPECT_EQ(output, first) << describe(seat, number);
}

std::string Simulation::describe(const Seat& seat, size_t number) const {
  const Call& call = (*seat.program)[number];
  return fmt::format("group \"{}\", rank {}, {} #{} of {}", seat.group->spec.name, seat.me,
                     toString(call.collective), number + 1, call.count);
}

bool Simulation::finished() const {
  for (const Player& player : players_) {
    for (const auto& seat : player.seats) {
      if (!player.dead && seat->ended < seat->program->size()) return false;
    }
  }
  return true;
}

// Makes an event at least this often, so that the clock never jumps over a deadline.
void Simulation::tick() {
  network_.at(network_.clock().now() + kTick, [this] { tick(); });
}

void Simulation::run() {
  tick();
  for (int turn = 0; !finished(); ++turn) {
    ASSERT_LT(turn, kMaxTurns) << "goes in circles";
    bool advanced = false;
    const auto first = static_cast<size_t>(random_.next());
    for (size_t i = 0; i < players_.size(); ++i) {
      Player& player = players_[(first + i) % players_.size()];
      // Skip turns of a rank at random: it may be many turns behind the others.
      if (player.dead || random_.chance(0.3)) continue;
      for (auto& seat : player.seats) {
        const bool more = seat->completions.size() < seat->program->size();
        if (!more || seat->completions.size() > seat->ended + 5 || random_.chance(0.5)) continue;
        submitNext(player, *seat);
        advanced = true;
      }
      advanced |= player.engine->progress().runTurn();
      for (auto& seat : player.seats) look(*seat);
      if (testing::Test::HasFailure()) return;
    }
    if (!advanced) network_.advance();
  }
}

std::string Simulation::describe() const {
  std::string text;
  for (const auto& node : nodes_) text += node + " ";
  return text + fmt::format("{} cards, {} groups", numCards_, programs_.size());
}

}  // namespace smddp::test
