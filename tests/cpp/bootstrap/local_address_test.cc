#include "bootstrap/local_address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "bootstrap/lifeline_wire.h"
#include "common/error.h"

namespace smddp::bootstrap {
namespace {

TEST(LocalAddress, IsLoopbackWhenTheMasterIs) {
  for (const char* master : {"", "localhost", "127.0.0.1"}) {
    EXPECT_EQ(localAddress(Settings(), master), "127.0.0.1") << master;
  }
}

TEST(LocalAddress, IsTheNamedInterfaces) {
  Settings settings;
  settings.interface = "lo";
  // Also if the master is on another host.
  EXPECT_EQ(localAddress(settings, "192.0.2.1"), "127.0.0.1");
}

TEST(LocalAddress, UnknownInterfaceIsAnErrorThatListsTheOthers) {
  Settings settings;
  settings.interface = "nosuch0";
  try {
    localAddress(settings, "");
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::Usage);
    EXPECT_THAT(error.what(), testing::HasSubstr("nosuch0"));
    EXPECT_THAT(error.what(), testing::ContainsRegex("there is.* lo"));
  }
}

TEST(LocalAddress, IsAlwaysOneThatASocketCanBind) {
  // Unroutable, unknown and own names. On any machine the result is one of its addresses, and not the wildcard.
  for (const char* master : {"192.0.2.1", "2001:db8::1", "::1", "no-such-host.invalid"}) {
    const std::string address = localAddress(Settings(), master);
    const Endpoint endpoint = parseNumericAddress(address);
    const int fd = ::socket(endpoint.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT_EQ(::bind(fd, endpoint.address(), endpoint.size()), 0) << master << ": " << address;
    ::close(fd);
  }
}

TEST(NumericAddress, RefusesNamesAndTheWildcard) {
  for (const char* text : {"0.0.0.0", "::", "localhost", "", "1.2.3", "1.2.3.4.5"}) {
    EXPECT_THROW(parseNumericAddress(text), Error) << text;
  }
}

}  // namespace
}  // namespace smddp::bootstrap
