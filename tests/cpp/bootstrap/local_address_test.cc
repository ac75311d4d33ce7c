#include "bootstrap/local_address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

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

// A folder like /sys/class with cards.
class Cards {
 public:
  ~Cards() { std::filesystem::remove_all(classes); }
  void add(const std::string& kind, const std::string& name, const std::string& interface = "") {
    const auto ports = classes / kind / name / "ports" / "1" / "gid_attrs" / "ndevs";
    std::filesystem::create_directories(ports);
    if (!interface.empty()) std::ofstream(ports / "0") << interface << "\n";
  }
  const std::filesystem::path classes =
      std::filesystem::temp_directory_path() / ("smddp-cards-" + std::to_string(getpid()));
};

TEST(LocalAddress, ACardWithoutAnInterfaceIsAccepted) {
  Cards cards;
  cards.add("infiniband", "rdmap0s6");
  cards.add("cxi", "cxi0");
  for (const char* domain : {"rdmap0s6-rdm", "rdmap0s6", "cxi0"}) {
    Settings settings;
    settings.interface = domain;
    EXPECT_EQ(localAddress(settings, "localhost", cards.classes), "127.0.0.1") << domain;
  }
}

TEST(LocalAddress, TheErrorNamesTheInterfaceOfACard) {
  Cards cards;
  cards.add("infiniband", "rxe0", "eth7");
  Settings settings;
  for (const auto& [domain, said] :
       {std::pair{"rxe0", "set the variable to the card's interface: eth7"},
        std::pair{"rxe1", "there is no such interface"},
        std::pair{"../cxi", "there is no such interface"}}) {
    settings.interface = domain;
    try {
      localAddress(settings, "localhost", cards.classes);
      FAIL() << domain << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::Usage);
      EXPECT_THAT(error.what(), testing::HasSubstr(said));
    }
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
