#include "transport/congestion.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>

#include "common/file_descriptor.h"

namespace smddp::transport {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr Nanoseconds kMillisecond = 1'000'000;
const NetworkPath kUnknown, kNear{.roundTrip = kMillisecond / 20},
    kZone{.roundTrip = kShortRoundTrip}, kFar{.roundTrip = 20 * kMillisecond},
    kLossy{.roundTrip = kMillisecond / 20, .isLossy = true};

struct Case {
  const char* setting;
  CongestionControls controls;
  NetworkPath path;
  const char* name;
};

TEST(Congestion, IsChosenByThePath) {
  const CongestionControls all{"bbr", {"reno", "bbr", "cubic"}}, few{"bbr", {"reno", "bbr"}},
      none{"bbr", {"bbr"}}, cubic{"cubic", {"reno", "cubic"}}, later{"bbr2", {"reno"}}, silent;
  const Case cases[] = {
      {"auto", all, kUnknown, "cubic"},  {"auto", all, kNear, "cubic"},
      {"auto", few, kNear, "reno"},      {"auto", few, kZone, "reno"},
      {"auto", later, kNear, "reno"},    {"auto", few, kFar, "bbr"},
      {"auto", few, kLossy, "bbr"},      {"auto", none, kNear, "bbr"},
      {"auto", cubic, kNear, "cubic"},   {"auto", cubic, kFar, "cubic"},
      {"auto", silent, kNear, ""},       {"system", all, kNear, "bbr"},
      {"system", cubic, kNear, "cubic"}, {"reno", all, kNear, "reno"},
      {"reno", all, kFar, "reno"},       {"bbr", all, kNear, "bbr"},
      {"cubic", few, kNear, "bbr"},      {"dctcp", cubic, kFar, "cubic"},
  };
  for (const Case& each : cases) {
    EXPECT_EQ(chooseCongestionControl(each.setting, each.controls, each.path), each.name)
        << each.setting << ", " << each.controls.system << ", " << each.path.roundTrip << " ns";
  }
}

TEST(Congestion, LossCountsWhenThereIsEnoughOfIt) {
  EXPECT_FALSE(isLossy(0, 0));
  EXPECT_FALSE(isLossy(999, 500)) << "too few packets";
  EXPECT_FALSE(isLossy(100'000, 999));
  EXPECT_TRUE(isLossy(100'000, 1000));
}

TEST(Congestion, SaysWhatConnectionsHaveAndWhy) {
  const auto text = [](const char* setting, const CongestionControls& controls) {
    return CongestionChooser(setting, controls).describe();
  };
  EXPECT_EQ(text("auto", {"bbr", {"reno", "bbr"}}),
            "congestion control reno; bbr, the system's, where a round trip takes more than 3 ms "
            "or many packets are lost");
  EXPECT_EQ(text("auto", {"cubic", {"reno"}}), "congestion control cubic, the system's");
  EXPECT_EQ(text("system", {"bbr", {"reno"}}), "congestion control bbr, the system's");
  EXPECT_EQ(text("reno", {"bbr", {"reno"}}), "congestion control reno");
  EXPECT_THAT(text("dctcp", {"bbr", {"reno"}}), HasSubstr("dctcp is not allowed here"));
  EXPECT_THAT(text("auto", {"bbr", {"bbr"}}), HasSubstr("neither cubic nor reno is allowed"));
  EXPECT_EQ(text("auto", {}), "congestion control unknown");
}

TEST(Congestion, KnowsWhatHindersIt) {
  EXPECT_TRUE(CongestionChooser("auto", {"bbr", {"bbr"}}).isHindered());
  EXPECT_TRUE(CongestionChooser("dctcp", {"bbr", {"reno"}}).isHindered());
  EXPECT_FALSE(CongestionChooser("auto", {"bbr", {"reno"}}).isHindered());
  EXPECT_FALSE(CongestionChooser("auto", {"cubic", {}}).isHindered());
  EXPECT_FALSE(CongestionChooser("system", {"bbr", {}}).isHindered());
}

TEST(Congestion, AsksTheKernelWhatItAllows) {
  const auto file = std::filesystem::path(::testing::TempDir()) / "smddp_congestion_test";
  std::ofstream(file) << "reno bbr\n";
  EXPECT_THAT(allowedCongestionControls(file), ElementsAre("reno", "bbr"));
  std::filesystem::remove(file);
  EXPECT_THAT(allowedCongestionControls(file), IsEmpty());
  EXPECT_THAT(CongestionChooser("auto").describe(), Not(HasSubstr("unknown")));
}

bool isAllowedHere(const std::string& name) {
  const auto names = allowedCongestionControls();
  return std::find(names.begin(), names.end(), name) != names.end();
}

// What getsockopt says, asked without the code that is tested.
std::string nameOf(const FileDescriptor& socket) {
  std::array<char, 64> name{};
  socklen_t size = name.size() - 1;
  EXPECT_EQ(::getsockopt(socket.get(), IPPROTO_TCP, TCP_CONGESTION, name.data(), &size), 0);
  return name.data();
}

FileDescriptor newSocket() { return FileDescriptor(::socket(AF_INET, SOCK_STREAM, 0)); }

// Both ends of a connection on loopback; `chooser` has begun with both.
std::pair<FileDescriptor, FileDescriptor> connected(const CongestionChooser& chooser) {
  const FileDescriptor listener = newSocket();
  FileDescriptor dialled = newSocket();
  chooser.begin(listener.get());
  chooser.begin(dialled.get());
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const raw = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(::bind(listener.get(), raw, size), 0);
  EXPECT_EQ(::listen(listener.get(), 1), 0);
  EXPECT_EQ(::getsockname(listener.get(), raw, &size), 0);
  EXPECT_EQ(::connect(dialled.get(), raw, size), 0);
  return {std::move(dialled), FileDescriptor(::accept(listener.get(), nullptr, nullptr))};
}

TEST(Congestion, SocketsHaveIt) {
  if (!isAllowedHere("reno")) GTEST_SKIP() << "the kernel does not allow reno";
  const CongestionChooser chooser("auto", {"bbr", {"reno"}});
  const auto [dialled, accepted] = connected(chooser);
  for (const FileDescriptor* socket : {&dialled, &accepted}) {
    EXPECT_EQ(nameOf(*socket), "reno") << "from the beginning";
    NetworkPath path;
    chooser.review(socket->get(), path);
    EXPECT_EQ(nameOf(*socket), "reno");
    EXPECT_GT(path.roundTrip, 0);
    EXPECT_FALSE(path.isLossy);
    EXPECT_EQ(congestionControlOf(socket->get()), "reno");
  }
}

TEST(Congestion, SocketsOfALossyPathGetWhatTheSystemHas) {
  if (!isAllowedHere("reno") || !isAllowedHere("bbr")) GTEST_SKIP() << "needs reno and bbr";
  const CongestionChooser chooser("auto", {"bbr", {"reno", "bbr"}});
  const auto [dialled, accepted] = connected(chooser);
  NetworkPath path{.isLossy = true};
  chooser.review(dialled.get(), path);
  EXPECT_EQ(nameOf(dialled), "bbr");
  EXPECT_EQ(nameOf(accepted), "reno") << "each end decides for itself";
}

TEST(Congestion, WhatCannotBeSetFailsNothing) {
  const CongestionChooser unknown("nonsense", {"nothing", {"nonsense"}});
  const auto [dialled, accepted] = connected(unknown);
  NetworkPath path;
  unknown.review(dialled.get(), path);
  EXPECT_EQ(nameOf(dialled), nameOf(newSocket()));
  EXPECT_EQ(congestionControlOf(-1), "");
}

}  // namespace
}  // namespace smddp::transport
