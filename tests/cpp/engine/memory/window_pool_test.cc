#include "engine/memory/window_pool.h"

#include <gtest/gtest.h>

#include <cstring>

namespace smddp::engine::memory {
namespace {

using transport::shm::Slab;

TEST(WindowPool, GivesMemoryBackToTheSystem) {
  const auto slab = Slab::create(size_t{64} << 20);
  WindowPool pool(slab);
  const auto window = pool.take(100'000);
  ASSERT_EQ(window.size(), 100'000u);
  std::memset(window.data(), 1, window.size());
  pool.giveBack(window);
  EXPECT_EQ(window[0], std::byte{0});
  EXPECT_EQ(slab->allocate(100'000).data(), window.data());
}

TEST(WindowPool, UsesWhatTheNetworkKnowsAgain) {
  const auto slab = Slab::create(size_t{64} << 20);
  WindowPool pool(slab);
  const auto window = pool.take(100'000);
  slab->keep(window);
  std::memset(window.data(), 1, window.size());
  pool.giveBack(window);
  EXPECT_EQ(window[0], std::byte{1}) << "the pages that the network knows are gone";
  EXPECT_NE(slab->allocate(100'000).data(), window.data());
  EXPECT_NE(pool.take(90'000).data(), window.data()) << "registered with another length";
  EXPECT_EQ(pool.take(100'000).data(), window.data());
  EXPECT_NE(pool.take(100'000).data(), window.data()) << "handed out twice";
}

}  // namespace
}  // namespace smddp::engine::memory
