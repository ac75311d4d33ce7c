// A rank that has met the others, but cannot join their group.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <latch>
#include <optional>
#include <thread>

#include "common/seal.h"
#include "engine/calls.h"
#include "engine/team/membership.h"
#include "support/local_store.h"
#include "support/watchdog.h"

namespace smddp::test {
namespace {

using testing::HasSubstr;

// Longer than the watchdog waits: a rank that hears nothing hangs.
constexpr Nanoseconds kForever = 3'600'000'000'000;

// Rank 1 reads here what it cannot work with: a region and an address of rank 0 that are none.
class SpoilingStore final : public bootstrap::Store {
 public:
  explicit SpoilingStore(LocalStore& store) : store_(store) {}
  void set(const std::string& key, const Value& value) override { store_.set(key, value); }
  int64_t add(const std::string& key, int64_t amount) override { return store_.add(key, amount); }
  bool contains(const std::string& key) override { return store_.contains(key); }
  Value get(const std::string& key, Nanoseconds timeout) override {
    Value value = store_.get(key, timeout);
    if (!key.ends_with("/in/0")) return value;
    const Seal seal("");
    EXPECT_EQ(seal.open(key, value), Seal::Verdict::Good);
    auto spoilt = bootstrap::parseIntroduction(value, 0);
    auto entry = engine::team::GroupEntry::decode(spoilt);
    ++entry.regionBytes;
    spoilt.group = entry.encode();
    if (!spoilt.fabric.empty()) spoilt.fabric.resize(1);
    return seal.close(key, bootstrap::serialise(spoilt));
  }

 private:
  LocalStore& store_;
};

class JoinTest : public testing::TestWithParam<std::vector<std::string>> {};
INSTANTIATE_TEST_SUITE_P(Layouts, JoinTest,
                         testing::Values(std::vector<std::string>{"a", "a", "a"},
                                         std::vector<std::string>{"a", "a", "b"},
                                         std::vector<std::string>{"a", "b", "c"}));

TEST_P(JoinTest, AllRanksHearWhyOneCannot) {
  const Watchdog watchdog;
  const auto& nodes = GetParam();
  const int size = static_cast<int>(nodes.size());
  LocalStore store;
  std::latch areDone(size);
  std::vector<std::optional<Error>> errors(nodes.size());
  const auto runRank = [&](Rank me) {
    engine::Engine::Options options;
    options.process.settings.nodeId = nodes[static_cast<size_t>(me)];
    options.process.slabBytes = size_t{16} << 30;
    engine::Engine engine(options);
    SpoilingStore spoiling(store);
    std::shared_ptr<engine::groups::Group> group;
    try {
      group = me == 1 ? engine.createGroup(spoiling, {"apart", me, size}, kForever)
                      : engine.createGroup(store, {"apart", me, size}, kForever);
      auto request = barrier();
      request.timeout = kForever;
      const auto completion = engine.submit(*group, std::move(request));
      engine.wait(*group, *completion);
      errors[static_cast<size_t>(me)] = completion->error();
    } catch (const Error& error) {
      errors[static_cast<size_t>(me)] = error;
    }
    areDone.arrive_and_wait();
  };
  std::vector<std::jthread> threads;
  for (Rank rank = 0; rank < size; ++rank) threads.emplace_back(runRank, rank);
  threads.clear();
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_THAT(error->what(), HasSubstr("rank 1 cannot join group \"apart\": "));
    EXPECT_EQ(error->kind(), errors[1]->kind());
  }
}

}  // namespace
}  // namespace smddp::test
