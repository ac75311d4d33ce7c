#include "common/host_address.h"

#include <gtest/gtest.h>

namespace smddp {
namespace {

TEST(HostAddress, ParsesNumericAddressesOnly) {
  for (const char* text : {"127.0.0.1", "::1", "192.0.2.1", "2001:db8::1"}) {
    const FoundAddresses found = parseAddress(text, 80);
    ASSERT_NE(found.list, nullptr) << text;
    EXPECT_EQ(printAddress(found.list->ai_addr), text);
    EXPECT_EQ(found.list->ai_socktype, SOCK_STREAM);
    EXPECT_EQ(found.list->ai_next, nullptr) << "an address of one socket type only";
  }
  for (const char* text : {"", "localhost", "1.2.3.4.5", "rank0.invalid"}) {
    const FoundAddresses found = parseAddress(text, 80);
    EXPECT_EQ(found.list, nullptr) << text;
    EXPECT_NE(found.failure, 0) << text;
    EXPECT_NE(found.why(), "") << text;
  }
}

TEST(HostAddress, NobodyIsCalledNothing) {
  EXPECT_EQ(lookUpHost("", 80).list, nullptr);
  EXPECT_EQ(lookUpHost("", 80).failure, EAI_NONAME);
  EXPECT_EQ(sourceTowards(""), "");
}

TEST(HostAddress, FindsNamesAndNumbers) {
  for (const char* host : {"localhost", "127.0.0.1", "::1"}) {
    EXPECT_NE(lookUpHost(host, 80).list, nullptr) << host;
  }
}

TEST(HostAddress, EveryInterfaceIsTheWildcard) {
  const FoundAddresses found = everyInterface(80);
  ASSERT_NE(found.list, nullptr);
  for (const addrinfo* one = found.list.get(); one != nullptr; one = one->ai_next) {
    const std::string text = printAddress(one->ai_addr);
    EXPECT_TRUE(text == "0.0.0.0" || text == "::") << text;
  }
}

TEST(HostAddress, PeersCannotUseAddressesOfOneLink) {
  EXPECT_FALSE(isUsableByPeers(nullptr));
  for (const auto& [text, usable] : {std::pair{"127.0.0.1", true}, std::pair{"2001:db8::1", true},
                                     std::pair{"fe80::1", false}}) {
    EXPECT_EQ(isUsableByPeers(parseAddress(text, 0).list->ai_addr), usable) << text;
  }
  const sockaddr other{.sa_family = AF_UNIX, .sa_data = {}};
  EXPECT_FALSE(isUsableByPeers(&other));
  EXPECT_EQ(printAddress(&other), "");
  EXPECT_EQ(printAddress(nullptr), "");
}

TEST(HostAddress, LoopbackIsTheSourceForLoopback) {
  EXPECT_EQ(sourceTowards("127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(sourceTowards("127.0.0.7"), "127.0.0.1");
  const std::string local = sourceTowards("localhost");
  EXPECT_TRUE(local == "127.0.0.1" || local == "::1") << local;
}

}  // namespace
}  // namespace smddp
