#include "engine/process/core_placement.h"

#include <gtest/gtest.h>

#include "transport/shm/slab.h"

namespace smddp::engine::process {
namespace {

cpu_set_t setOf(std::initializer_list<int> cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(core, &set);
  return set;
}

TEST(FewestMatesTest, ChoosesTheCoresWithFewestMates) {
  struct Case {
    std::initializer_list<int> allowed;
    int mine;
    std::vector<int> mates;
    std::initializer_list<int> best;  // none: stay
  };
  const Case cases[] = {
      {{0, 1}, 0, {}, {}},                // alone
      {{0, 1}, 0, {1}, {}},               // each has its own
      {{0, 1}, 0, {0}, {1}},              // two on one core
      {{0}, 0, {0}, {}},                  // pinned
      {{0, 1}, 0, {0, 1, 1}, {}},         // two and two
      {{0, 1}, 0, {0, 0, 1}, {1}},        // three and one: two and two afterwards
      {{0, 1}, 0, {0, 1}, {}},            // two and one: no better the other way round
      {{0, 1, 2, 3}, 2, {2, 0}, {1, 3}},  // any free core
      {{4, 5}, 4, {4, 0}, {5}},           // only cores on which it may run
      {{0, 1}, -1, {0}, {}},              // unknown
      {{0, 1}, 0, {-1, 0}, {1}},          // a mate whose core is unknown
  };
  for (const Case& c : cases) {
    const auto best = coresWithFewestMates(setOf(c.allowed), c.mine, c.mates);
    ASSERT_EQ(best.has_value(), c.best.size() > 0) << &c - cases;
    const cpu_set_t expected = setOf(c.best);
    if (!best) continue;
    EXPECT_TRUE(CPU_EQUAL(&*best, &expected)) << &c - cases;
  }
}

TEST(CorePlacementTest, MovesAwayFromAMateAndStaysFree) {
  cpu_set_t before, after;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  if (CPU_COUNT(&before) < 2) GTEST_SKIP() << "this test is pinned to one core";
  const auto mine = transport::shm::Slab::create(size_t{256} << 20);
  const auto theirs = transport::shm::Slab::create(size_t{256} << 20);
  CorePlacement placement(mine->page());
  const transport::shm::ProcessPage* mates[] = {&theirs->page()};
  for (const Nanoseconds now : {0, 20'000'000}) {
    placement.note();
    const int shared = mine->page().core.load();
    theirs->page().core.store(shared);
    placement.moveApart(mates, now);
    EXPECT_NE(mine->page().core.load(), shared);
    // It must not move a second time so soon.
    theirs->page().core.store(mine->page().core.load());
    const int here = mine->page().core.load();
    placement.moveApart(mates, now + 1000);
    EXPECT_EQ(mine->page().core.load(), here);
  }
  ASSERT_EQ(sched_getaffinity(0, sizeof after, &after), 0);
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
}

}  // namespace
}  // namespace smddp::engine::process
