#include "transport/network/network.h"

#include <filesystem>

#include <gtest/gtest.h>

namespace smddp::transport::network {
namespace {

TEST(Network, CardsAreFoundInSysfs) {
  const std::filesystem::path classes =
      std::filesystem::path(::testing::TempDir()) / "smddp_network_test";
  std::filesystem::remove_all(classes);
  EXPECT_FALSE(hasCard(classes)) << "no such kind of device";
  std::filesystem::create_directories(classes / "net" / "eth0");
  std::filesystem::create_directories(classes / "infiniband");
  EXPECT_FALSE(hasCard(classes)) << "the module is there, a card is not";
  std::filesystem::create_directories(classes / "infiniband" / "rdmap16s27");
  EXPECT_TRUE(hasCard(classes));
  std::filesystem::remove_all(classes / "infiniband");
  std::filesystem::create_directories(classes / "cxi" / "cxi0");
  EXPECT_TRUE(hasCard(classes));
  std::filesystem::remove_all(classes);
}

}  // namespace
}  // namespace smddp::transport::network
