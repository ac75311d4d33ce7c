#include "transport/tcp/tcp_transport.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

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
  ASSERT_TRUE(other.control(other.connect(transport.address(), "this rank"), pattern(10, 1)));
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

// A long put from one transport to another, whose payload the receiver has posted.
class TcpPosted : public ::testing::Test {
 protected:
  static constexpr size_t kBytes = 16 << 20;

  void send() {
    const PeerId peer = sender_.connect(receiver_.address(), "the receiver");
    receiver_.connect(sender_.address(), "the sender");
    const RemoteKey key = receiver_.registerMemory(slot_);
    sink_.posted = posted_;
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

TEST(TcpStrangers, ThoseWithoutTheTokenAreRefused) {
  tcp::TcpTransport transport(options("token")), stranger(options("guess"));
  RecordingSink sink, itsSink;
  const PeerId peer = stranger.connect(transport.address(), "the rank it attacks");
  transport.connect(stranger.address(), "the rank that it says it is");
  ASSERT_TRUE(stranger.control(peer, pattern(10, 1)));
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
