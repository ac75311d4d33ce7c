// The placement of shared memory on a machine with several NUMA nodes. Pages must lie on the node of the rank that owns
// them, although nothing binds them: the kernel places a page on the node of the thread that touches it first, and
// owners back their memory before mates may touch it. With one NUMA node the tests are skipped.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <string>
#include <thread>

#include "engine/calls.h"
#include "support/ranks.h"
#include "support/watchdog.h"
#include "transport/shm/ring.h"

namespace smddp::test {
namespace {

constexpr size_t kPage = 4096;

struct NumaNode {
  int number;
  cpu_set_t cores;
};

// Parses a list in the kernel's format, such as "0-3,8".
cpu_set_t parseList(const std::string& text) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  const char* at = text.c_str();
  int first = 0, last = 0, used = 0;
  while (sscanf(at, "%d%n", &first, &used) == 1) {
    at += used;
    last = first;
    if (sscanf(at, "-%d%n", &last, &used) == 1) at += used;
    for (int core = first; core <= last; ++core) CPU_SET(core, &cores);
    if (*at == ',') ++at;
  }
  return cores;
}

// The NUMA nodes on which this process may run.
std::vector<NumaNode> usableNodes() {
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof allowed, &allowed);
  std::vector<NumaNode> nodes;
  for (int number = 0; number < 64; ++number) {
    std::ifstream file("/sys/devices/system/node/node" + std::to_string(number) + "/cpulist");
    std::string text;
    if (!std::getline(file, text)) continue;
    NumaNode node{number, parseList(text)};
    CPU_AND(&node.cores, &node.cores, &allowed);
    if (CPU_COUNT(&node.cores) > 0) nodes.push_back(node);
  }
  return nodes;
}

// The number of the range's pages on each node. Pages that were never touched lie on no node.
std::map<int, size_t> pagesByNode(std::byte* begin, size_t bytes) {
  std::vector<void*> pages;
  for (size_t at = 0; at < bytes; at += kPage) pages.push_back(begin + at);
  std::vector<int> nodes(pages.size(), -1);
  EXPECT_EQ(syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, nodes.data(), 0), 0);
  std::map<int, size_t> counts;
  for (const int node : nodes) {
    if (node >= 0) ++counts[node];
  }
  return counts;
}

// Two ranks, as threads on two nodes. Threads that they start inherit the binding.
class NumaTest : public testing::Test {
 protected:
  void SetUp() override {
    nodes_ = usableNodes();
    if (nodes_.size() < 2) GTEST_SKIP() << "this process may run on one NUMA node only";
  }
  void onTwoNodes(const std::function<void(RankContext&)>& body) {
    runRanks({2}, body, [this](Rank rank, engine::Engine::Options&) {
      ASSERT_EQ(sched_setaffinity(0, sizeof(cpu_set_t), &nodes_[rank].cores), 0);
    });
  }
  void expectAllOn(const NumaNode& node, std::byte* begin, size_t bytes, const char* what) {
    const auto counts = pagesByNode(begin, bytes);
    ASSERT_EQ(counts.size(), 1u) << what;
    EXPECT_EQ(counts.begin()->first, node.number) << what;
  }

  std::vector<NumaNode> nodes_;

 private:
  Watchdog watchdog_{110};
};

TEST_F(NumaTest, StagingMemoryAndWindowsLieWithTheirOwner) {
  onTwoNodes([&](RankContext& rank) {
    std::vector<float> vector(1 << 20, 1.0f);
    for (int i = 0; i < 4; ++i) rank.run(allReduce(bytesOf(vector)));
    // Longer than a message that is sent with its announcement, so it goes through a window of the receiver.
    for (const bool send : {rank.rank == 0, rank.rank != 0}) {
      engine::calls::Message message;
      message.send = send;
      message.peer = 1 - rank.rank;
      message.buffer = {bytesOf(vector)};
      message.timeout = kTimeout;
      const auto completion = rank.engine.submit(*rank.group, std::move(message));
      rank.engine.wait(*rank.group, *completion);
      if (completion->error()) throw *completion->error();
    }
    auto& slab = *rank.engine.process().memory().slab;
    const NumaNode& own = nodes_[rank.rank];
    // The writer and the reader of a ring are on different nodes, so either node is right.
    const size_t rings = slab.page().ringsOffset.load();
    const size_t ringsEnd = rings + sizeof(transport::shm::RingTable);
    expectAllOn(own, slab.data(), rings, "the control page");
    const auto rest = pagesByNode(slab.data() + ringsEnd, size_t{64} << 20);
    // At least both halves of the staging memory must be there.
    EXPECT_GT(rest.contains(own.number) ? rest.at(own.number) : 0, 16u);
    EXPECT_EQ(rest.size(), 1u) << "rank " << rank.rank;
    rank.run(barrier());
  });
}

TEST_F(NumaTest, CommunicationMemoryLiesWithItsOwner) {
  onTwoNodes([&](RankContext& rank) {
    auto& memory = *rank.engine.process().memory().tensors;
    constexpr size_t kBytes = 8 << 20;
    // In an allreduce a mate writes every other slice, before the owner of the buffer has touched it.
    Block own(kBytes, 0, &memory);
    auto* const sum = static_cast<std::byte*>(memory.allocate(kBytes));
    engine::calls::Request request = allReduce({sum, kBytes});
    request.input = {own.bytes()};
    rank.run(std::move(request));
    EXPECT_EQ(rank.group->plans.statistics().at("allreduce/zero_copy").calls, 1u);
    expectAllOn(nodes_[rank.rank], sum, kBytes, "the sum");
    rank.run(barrier());
    memory.free(sum);
  });
}

}  // namespace
}  // namespace smddp::test
