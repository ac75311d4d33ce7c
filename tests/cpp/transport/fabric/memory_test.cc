#include "transport/fabric/memory.h"

#include <gtest/gtest.h>

#include <optional>
#include <utility>
#include <vector>

#include "common/error.h"
#include "transport/fabric/discovery.h"

namespace smddp::transport::fabric {
namespace {

// A real domain, of a provider that every machine has.
struct MemoryTest : ::testing::Test {
  void SetUp() override {
    found = discover();
    Options options;
    options.provider = "tcp";
    const size_t index = choose(found.offered, options, "").index;
    info.reset(library().dupInfo(found.raw[index]));
    fabric = createFabric(*info);
    domain = createDomain(*fabric, *info);
  }
  Registry registryOf(int mrMode, bool remote) {
    return Registry(*domain, nullptr, mrMode, remote);
  }

  std::vector<std::byte> memory = std::vector<std::byte>(8192);
  Discovery found;
  InfoPtr info;
  Fabric fabric;
  Domain domain;
};

TEST_F(MemoryTest, WithoutLocalRegistrationEveryByteIsKnown) {
  const Registry registry = registryOf(0, true);
  const auto descriptor = registry.descriptorOf(memory);
  ASSERT_TRUE(descriptor);
  EXPECT_EQ(*descriptor, nullptr);
}

TEST_F(MemoryTest, LocalRegistrationIsFoundForEveryPartAndForNothingBeyond) {
  Registry registry = registryOf(FI_MR_LOCAL, true);
  const auto middle = std::span(memory).subspan(1024, 4096);
  registry.addLocal(middle);
  registry.addLocal(std::span(memory).subspan(2048, 64));  // a smaller region inside
  const auto isKnown = [&](size_t offset, size_t size) {
    const auto descriptor = registry.descriptorOf(Bytes(memory).subspan(offset, size));
    EXPECT_EQ(descriptor.value_or(nullptr) != nullptr, descriptor.has_value());
    return descriptor.has_value();
  };
  EXPECT_TRUE(isKnown(1024, 4096));
  EXPECT_TRUE(isKnown(2050, 62));
  EXPECT_TRUE(isKnown(2050, 1000)) << "only the larger region holds it";
  EXPECT_TRUE(isKnown(5119, 1));
  EXPECT_FALSE(isKnown(1023, 2));
  EXPECT_FALSE(isKnown(5119, 2));
  EXPECT_FALSE(isKnown(0, 8));
}

TEST_F(MemoryTest, MemoryOfADeviceIsKnownUntilItIsRemoved) {
  for (const int mrMode : {0, FI_MR_LOCAL}) {
    Registry registry = registryOf(mrMode, true);
    const auto device = std::span(memory).subspan(1024, 4096);
    const auto descriptor = [&](size_t offset, size_t size) {
      return registry.deviceDescriptorOf(Bytes(memory).subspan(offset, size));
    };
    EXPECT_THROW(descriptor(2000, 8), Error);
    for (int round = 0; round < 2; ++round) {
      registry.addDevice({device});
      EXPECT_NE(descriptor(1024, 4096), nullptr);
      EXPECT_EQ(descriptor(5119, 1), descriptor(1024, 4096));
      for (const size_t outside : {size_t{1020}, size_t{5116}, size_t{6000}}) {
        EXPECT_THROW(descriptor(outside, 8), Error) << outside;
      }
      // Memory of the host is registered separately, also at the same addresses.
      EXPECT_EQ(registry.descriptorOf(device).has_value(), mrMode == 0);
      registry.removeDevice(device);
      registry.removeDevice(device);
      EXPECT_THROW(descriptor(2000, 8), Error);
    }
  }
}

TEST_F(MemoryTest, WhatIsKnownIsNotRegisteredAgain) {
  Registry registry = registryOf(FI_MR_LOCAL, true);
  const auto descriptor = [&](size_t offset) {
    return registry.descriptorOf(Bytes(memory).subspan(offset, 64)).value_or(nullptr);
  };
  EXPECT_TRUE(registry.addLocal(std::span(memory).first(4096)));
  void* const first = descriptor(1024);
  EXPECT_TRUE(registry.addLocal(std::span(memory).subspan(1024, 1024)));
  EXPECT_TRUE(registry.addLocal(std::span(memory).first(4096)));
  EXPECT_EQ(descriptor(1024), first);
  EXPECT_TRUE(registry.addLocal(memory));  // grown
  EXPECT_NE(descriptor(5000), nullptr);
  EXPECT_NE(descriptor(5000), first);
  Registry other = registryOf(0, true);
  EXPECT_FALSE(other.addLocal(memory)) << "nobody asks for it";
}

TEST_F(MemoryTest, TranslatesOnlyWhatLiesInsideARegion) {
  Registry registry = registryOf(0, false);
  const RemoteKey key = registry.add(memory);
  EXPECT_EQ(registry.translate(key, 0, 8192), memory.data());
  EXPECT_EQ(registry.translate(key, 8191, 1), memory.data() + 8191);
  EXPECT_EQ(registry.translate(key, 1, 8192), nullptr);
  EXPECT_EQ(registry.translate(key, ~0ull, 2), nullptr);
  EXPECT_EQ(registry.translate({key.address, key.key + 1}, 0, 1), nullptr);
  EXPECT_EQ(registry.translate({key.address + 8, key.key}, 0, 1), nullptr);
}

TEST_F(MemoryTest, LocalMemoryIsNoTarget) {
  Registry registry = registryOf(FI_MR_LOCAL, false);
  registry.addLocal(memory);
  for (uint64_t key = 0; key < 8; ++key) EXPECT_EQ(registry.translate({0, key}, 0, 1), nullptr);
}

TEST_F(MemoryTest, EmptyRangeIsRefused) {
  Registry registry = registryOf(0, true);
  EXPECT_THROW(registry.add({}), Error);
}

TEST_F(MemoryTest, BounceBuffersAreReusedRegisteredAndBounded) {
  std::optional<BouncePool> pool;  // its memory outlives the registrations, as in Endpoint
  Registry registry = registryOf(FI_MR_LOCAL, true);
  pool.emplace(registry);
  auto first = pool->take(5000);
  std::byte* const place = first.get();
  EXPECT_NE(registry.descriptorOf({place, 5000}).value_or(nullptr), nullptr);
  first.reset();
  EXPECT_EQ(pool->take(6000).get(), place) << "same size class, used before";

  std::vector<BouncePool::Buffer> lent;
  while (auto buffer = pool->take(8u << 20)) lent.push_back(std::move(buffer));
  EXPECT_EQ(lent.size(), 8u);
  lent.clear();
  EXPECT_NE(pool->take(256u << 20), nullptr) << "always succeeds when nothing is lent";
}

}  // namespace
}  // namespace smddp::transport::fabric
