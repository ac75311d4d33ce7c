#include "transport/tcp/tcp_transport.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "common/clock.h"
#include "transport/recording_sink.h"
#include "transport/striped_transport.h"
#include "transport/transport_suite.h"

namespace smddp::transport::testing {
namespace {

Kind kindOf(const std::string& name, const std::string& host, int numCards = 1) {
  return {name, [=](int count) {
            std::vector<std::unique_ptr<Transport>> transports;
            for (int i = 0; i < count; ++i) {
              std::vector<std::unique_ptr<Transport>> cards;
              for (int card = 0; card < numCards; ++card) {
                cards.push_back(std::make_unique<tcp::TcpTransport>(
                    tcp::Options{.host = host, .seal = Seal("token")}));
              }
              if (numCards == 1) {
                transports.push_back(std::move(cards.front()));
              } else {
                transports.push_back(std::make_unique<StripedTransport>(std::move(cards)));
              }
            }
            return std::make_unique<HeapFixture>(std::move(transports));
          }};
}

INSTANTIATE_TEST_SUITE_P(Tcp, TransportSuite,
                         ::testing::Values(kindOf("IPv4", "127.0.0.1"), kindOf("IPv6", "::1"),
                                           kindOf("two_cards", "127.0.0.1", 2)),
                         kindName);

// A connection of a program that knows nothing but the port.
FileDescriptor callTo(const Transport& transport) {
  const tcp::Address address = tcp::decodeAddress(transport.address());
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(address.port);
  EXPECT_EQ(::inet_pton(AF_INET, address.host.c_str(), &to.sin_addr), 1);
  FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to), 0);
  return socket;
}

// Whether the other end closes the connection while `transport` is polled.
bool isClosed(Transport& transport, const FileDescriptor& socket) {
  RecordingSink sink;
  for (int i = 0; i < 100; ++i) {
    transport.poll(sink);
    pollfd wait{socket.get(), POLLIN, 0};
    if (::poll(&wait, 1, 1) == 1) {
      std::byte byte;
      return ::recv(socket.get(), &byte, 1, 0) <= 0;
    }
  }
  return false;
}

// Sends a control message when there is a connection. The kernel makes it, so the peer need not be polled.
void send(Transport& transport, PeerId peer, Bytes message, Sink& sink) {
  const MonotonicClock clock;
  const Deadline deadline = Deadline::after(clock, 10'000'000'000);
  while (!transport.control(peer, message)) {
    ASSERT_FALSE(deadline.passed(clock)) << "no room for a control message";
    transport.poll(sink);
  }
}

tcp::Options options(const std::string& token) {
  return {.host = "127.0.0.1", .seal = Seal(token), .maxStrangers = 4};
}

TEST(TcpStrangers, TheOldestThatSaysNothingMakesRoom) {
  tcp::TcpTransport transport(options("token"));
  RecordingSink sink;
  std::vector<FileDescriptor> strangers;
  for (int i = 0; i < 4; ++i) strangers.push_back(callTo(transport));
  transport.poll(sink);
  // The new caller is accepted in the same poll that hears of bytes from the one that is closed for it.
  strangers.push_back(callTo(transport));
  ASSERT_EQ(::send(strangers[0].get(), "x", 1, 0), 1);
  transport.poll(sink);
  EXPECT_TRUE(isClosed(transport, strangers[0]));
  for (size_t i = 1; i < strangers.size(); ++i) EXPECT_FALSE(isClosed(transport, strangers[i]));
}

TEST(TcpStrangers, AHelloThatHasArrivedCounts) {
  tcp::TcpTransport transport(options("token")), other(options("token"));
  RecordingSink sink, itsSink;
  transport.connect(other.address(), "the peer");
  send(other, other.connect(transport.address(), "this rank"), pattern(10, 1), itsSink);
  for (int i = 0; i < 10; ++i) other.poll(itsSink);
  // All are accepted in one poll, the peer first.
  std::vector<FileDescriptor> strangers;
  for (int i = 0; i < 10; ++i) strangers.push_back(callTo(transport));
  for (int i = 0; i < 100 && sink.controls.empty(); ++i) {
    other.poll(itsSink);
    transport.poll(sink);
  }
  EXPECT_EQ(sink.controls.size(), 1u);
  EXPECT_TRUE(itsSink.failed.empty());
}

// A worker of a data loader, say, has copies of all sockets.
TEST(TcpStrangers, WhoIsClosedStaysClosedBesideAForkedChild) {
  tcp::TcpTransport transport(options("token"));
  RecordingSink sink;
  FileDescriptor stranger = callTo(transport);
  transport.poll(sink);
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::pause();
    ::_exit(0);
  }
  ASSERT_GT(child, 0);
  const std::vector<std::byte> noHello = pattern(64, 1);
  ASSERT_EQ(::send(stranger.get(), noHello.data(), noHello.size(), 0), 64);
  EXPECT_TRUE(isClosed(transport, stranger));
  // Events of its socket would have the address of what is gone.
  ::send(stranger.get(), noHello.data(), noHello.size(), MSG_NOSIGNAL);
  stranger = FileDescriptor();
  for (int i = 0; i < 10; ++i) transport.poll(sink);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

TEST(TcpStrangers, WaitWithoutWakingWhileThereIsNoDescriptor) {
  tcp::TcpTransport transport(options("token"));
  RecordingSink sink;
  const auto isReady = [&] {
    pollfd wait{transport.waitDescriptor(), POLLIN, 0};
    return ::poll(&wait, 1, 0) == 1;
  };
  const FileDescriptor stranger = callTo(transport);
  EXPECT_TRUE(isReady());
  rlimit files{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &files), 0);
  const rlimit none{3, files.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  transport.poll(sink);
  const bool wakesUp = isReady();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &files), 0);
  EXPECT_FALSE(wakesUp);
  // It tries again after a second.
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));
  ASSERT_EQ(::send(stranger.get(), pattern(64, 1).data(), 64, 0), 64);
  EXPECT_TRUE(isClosed(transport, stranger));
}

// Takes in control messages.
struct Controls final : tcp::Receiver {
  std::span<std::byte> slotFor(const tcp::FrameHeader&) override { return {}; }
  std::span<std::byte> placeFor(const tcp::FrameHeader&, size_t) override { return {}; }
  void onControlFrame(Bytes message) override {
    found.emplace_back(message.begin(), message.end());
  }
  void onPutFrame(const tcp::FrameHeader&) override {}
  std::vector<std::vector<std::byte>> found;
};

TEST(TcpConnection, WhatHasArrivedCountsAfterASendThatFails) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()), 0);
  tcp::Connection connection{FileDescriptor(ends[0])}, other{FileDescriptor(ends[1])};
  std::vector<uint64_t> done;
  const std::vector<std::byte> last = pattern(10, 1);
  other.queueControl(last);
  other.send(done);
  ::shutdown(ends[1], SHUT_RDWR);
  connection.queueControl(last);
  connection.send(done);
  EXPECT_EQ(connection.failure(), "");
  Controls controls;
  EXPECT_FALSE(connection.receive(controls));
  ASSERT_EQ(controls.found.size(), 1u);
  EXPECT_EQ(controls.found.front(), last);
  EXPECT_NE(connection.failure(), "");
}

// Both ends have opened a connection to the other one, so what one sends comes on its own.
TEST(TcpTransport, WhatHasArrivedOnOneConnectionCountsWhenTheOtherEnds) {
  auto dying = std::make_unique<tcp::TcpTransport>(options("token"));
  tcp::TcpTransport transport(options("token"));
  RecordingSink sink, itsSink;
  const PeerId peer = transport.connect(dying->address(), "the rank that dies");
  const PeerId me = dying->connect(transport.address(), "this rank");
  ASSERT_FALSE(transport.control(peer, pattern(10, 1)));
  ASSERT_FALSE(dying->control(me, pattern(10, 2)));
  send(transport, peer, pattern(10, 1), sink);
  send(*dying, me, pattern(10, 2), itsSink);
  for (int i = 0; i < 100 && (sink.controls.empty() || itsSink.controls.empty()); ++i) {
    dying->poll(itsSink);
    transport.poll(sink);
  }
  const std::vector<std::byte> last = pattern(10, 3);
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(dying->control(me, last));
  dying->poll(itsSink);
  dying.reset();
  // So its own connection comes first.
  ASSERT_TRUE(transport.control(peer, last));
  for (int i = 0; i < 100 && sink.failed.empty(); ++i) transport.poll(sink);
  EXPECT_EQ(sink.failed.count(peer), 1u);
  EXPECT_EQ(sink.controls.size(), 21u);
}

// A thread that has a network of its own: loopback, whose address can be taken away, and with it the route to it.
class TcpOutage : public ::testing::Test {
 protected:
  void run(const std::function<void()>& body) {
    bool isAllowed = false;
    std::thread([&] {
      isAllowed = ::unshare(CLONE_NEWNET) == 0;
      if (!isAllowed) return;
      ifreq request{};
      request.ifr_flags = IFF_UP;
      configure(SIOCSIFFLAGS, request);
      setRoute(true);
      body();
    }).join();
    if (!isAllowed) GTEST_SKIP() << "a network of its own needs root";
  }
  static void setRoute(bool exists) {
    ifreq request{};
    auto& address = reinterpret_cast<sockaddr_in&>(request.ifr_addr);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(exists ? INADDR_LOOPBACK : 0x0A000001);
    configure(SIOCSIFADDR, request);
  }
  static tcp::Options within(Nanoseconds hostTimeout) {
    return {.host = "127.0.0.1", .hostTimeout = hostTimeout};
  }

 private:
  static void configure(unsigned long what, ifreq& request) {
    std::strcpy(request.ifr_name, "lo");
    const FileDescriptor socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(::ioctl(socket.get(), what, &request), 0) << std::strerror(errno);
  }
};

TEST_F(TcpOutage, AFirstConnectionWaitsForANetworkThatComesBack) {
  run([] {
    tcp::TcpTransport transport(within(10'000'000'000)), other(within(10'000'000'000));
    RecordingSink sink, itsSink;
    const PeerId peer = transport.connect(other.address(), "the peer");
    other.connect(transport.address(), "this rank");
    setRoute(false);
    for (int i = 0; i < 300; ++i) {
      ASSERT_FALSE(transport.control(peer, pattern(10, 1)));
      transport.poll(sink);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    setRoute(true);
    send(transport, peer, pattern(10, 1), sink);
    for (int i = 0; i < 1000 && itsSink.controls.empty(); ++i) {
      transport.poll(sink);
      other.poll(itsSink);
    }
    EXPECT_EQ(itsSink.controls.size(), 1u);
    EXPECT_TRUE(sink.failed.empty());
  });
}

TEST_F(TcpOutage, AFirstConnectionFailsWhenTheNetworkStaysAway) {
  run([] {
    tcp::TcpTransport transport(within(300'000'000)), other(within(300'000'000));
    RecordingSink sink;
    const PeerId peer = transport.connect(other.address(), "the peer");
    setRoute(false);
    for (int i = 0; i < 10'000 && sink.failed.empty(); ++i) {
      ASSERT_FALSE(transport.control(peer, pattern(10, 1)));
      transport.poll(sink);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ASSERT_EQ(sink.failed.count(peer), 1u);
    EXPECT_THAT(sink.failed[peer], ::testing::HasSubstr("Network is unreachable"));
  });
}

// A long put from one transport to another, whose payload the receiver has posted.
class TcpPosted : public ::testing::Test {
 protected:
  static constexpr size_t kBytes = 16 << 20;

  void send() {
    const PeerId peer = sender_.connect(receiver_.address(), "the receiver");
    receiver_.connect(sender_.address(), "the sender");
    const RemoteKey key = receiver_.registerMemory(slot_);
    sink_.posted = posted_;
    testing::send(sender_, peer, pattern(8, 1), senderSink_);
    ASSERT_TRUE(sender_.put(peer, {key, 0}, 7, header_, Payload(payload_), 1));
  }
  // Until `done` says so. A poll receives about 1 MiB.
  template <typename Done>
  void pollUntil(const Done& done) {
    for (int i = 0; i < 100000 && !done(); ++i) {
      sender_.poll(senderSink_);
      receiver_.poll(sink_);
    }
    ASSERT_TRUE(done());
  }

  tcp::TcpTransport sender_{options("token")}, receiver_{options("token")};
  RecordingSink senderSink_, sink_;
  const std::vector<std::byte> header_ = pattern(kHeaderBytes, 1), payload_ = pattern(kBytes, 2);
  std::vector<std::byte> slot_ = std::vector<std::byte>(kHeaderBytes + kBytes);
  std::vector<std::byte> posted_ = std::vector<std::byte>(kBytes);
};

TEST_F(TcpPosted, PayloadsArriveThere) {
  send();
  pollUntil([&] { return sink_.puts[7] == 1; });
  EXPECT_TRUE(std::equal(header_.begin(), header_.end(), slot_.begin()));
  EXPECT_EQ(posted_, payload_);
}

TEST_F(TcpPosted, NothingArrivesThereAfterItIsWithdrawn) {
  send();
  pollUntil([&] { return posted_[kBytes / 4] == payload_[kBytes / 4]; });
  receiver_.withdraw(posted_);
  const std::vector<std::byte> before = posted_;
  ASSERT_NE(before.back(), payload_.back());
  posted_ = std::vector<std::byte>();
  pollUntil([&] { return sink_.puts[7] == 1; });
  // What came before went to posted memory; the rest lies in the slot.
  EXPECT_TRUE(std::equal(before.begin(), before.begin() + kBytes / 4, payload_.begin()));
  EXPECT_TRUE(std::equal(slot_.end() - 4096, slot_.end(), payload_.end() - 4096));
}

TEST(TcpTransport, ConnectionsHaveTheCongestionControlOfTheirPath) {
  const auto names = allowedCongestionControls();
  if (std::find(names.begin(), names.end(), "reno") == names.end()) {
    GTEST_SKIP() << "the kernel does not allow reno";
  }
  tcp::Options choosing = options("token");
  choosing.congestion = CongestionChooser("auto", {"bbr", {"reno"}});
  tcp::TcpTransport one(choosing), other(choosing);
  EXPECT_THAT(one.describe(), ::testing::HasSubstr("congestion control reno; bbr, the system's, "));
  RecordingSink sink, itsSink;
  one.connect(other.address(), "the peer");
  send(other, other.connect(one.address(), "this rank"), pattern(10, 1), itsSink);
  for (int i = 0; i < 100 && sink.controls.empty(); ++i) {
    other.poll(itsSink);
    one.poll(sink);
  }
  for (const tcp::TcpTransport* transport : {&one, &other}) {
    EXPECT_THAT(transport->describe(), ::testing::EndsWith("; 1 connection with reno"));
  }
}

TEST(TcpStrangers, ThoseWithoutTheTokenAreRefused) {
  tcp::TcpTransport transport(options("token")), stranger(options("guess"));
  RecordingSink sink, itsSink;
  const PeerId peer = stranger.connect(transport.address(), "the rank it attacks");
  transport.connect(stranger.address(), "the rank that it says it is");
  send(stranger, peer, pattern(10, 1), itsSink);
  for (int i = 0; i < 100 && itsSink.failed.empty(); ++i) {
    stranger.poll(itsSink);
    transport.poll(sink);
  }
  EXPECT_EQ(itsSink.failed.count(peer), 1u);
  EXPECT_TRUE(sink.controls.empty());
  EXPECT_TRUE(sink.failed.empty());
}

}  // namespace
}  // namespace smddp::transport::testing
