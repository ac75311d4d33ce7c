// A host that is silent on a lifeline, and what counts as its answer. The time of the looks is made up.
#include "bootstrap/host_watch.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <functional>
#include <thread>
#include <vector>

namespace smddp::bootstrap {
namespace {

constexpr Nanoseconds kPeriod = HostWatch::kPeriod;
// The answers of this machine take less than half of it.
constexpr int kLong = 20;

// So it is soon full.
void setSmall(const FileDescriptor& socket, int buffer) {
  const int bytes = 4096;
  EXPECT_EQ(::setsockopt(socket.get(), SOL_SOCKET, buffer, &bytes, sizeof bytes), 0);
}

struct Listener {
  Listener(const std::string& address, int backlog) : endpoint(parseNumericAddress(address)) {
    socklen_t size = sizeof endpoint.storage;
    socket = FileDescriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    setSmall(socket, SO_RCVBUF);
    EXPECT_EQ(::bind(socket.get(), endpoint.address(), endpoint.size()), 0);
    EXPECT_EQ(::listen(socket.get(), backlog), 0);
    EXPECT_EQ(::getsockname(socket.get(), endpoint.address(), &size), 0);
  }
  FileDescriptor accept() const {
    return FileDescriptor(::accept4(socket.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  }
  Endpoint endpoint;
  FileDescriptor socket;
};

// No other program has a connection to this address.
std::string ownAddress() {
  const int pid = ::getpid();
  return fmt::format("127.{}.{}.{}", 2 + (pid >> 16) % 200, pid >> 8 & 255, 1 + pid % 250);
}

void readAll(const FileDescriptor& from) {
  std::array<std::byte, 4096> bytes;
  while (::recv(from.get(), bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) {
  }
}

size_t numOpenDescriptors() {
  const auto entries = std::filesystem::directory_iterator("/proc/self/fd");
  return std::distance(begin(entries), end(entries));
}

// A watch of a peer, whose lifeline leads elsewhere than new connections to its host.
class HostWatchTest : public testing::Test {
 protected:
  HostWatchTest() : peers_("127.0.0.1", 8), host_(ownAddress(), 0) {
    lifeline_ = FileDescriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    setSmall(lifeline_, SO_SNDBUF);
    const Endpoint& to = peers_.endpoint;
    EXPECT_EQ(::connect(lifeline_.get(), to.address(), to.size()), 0);
    while (!peer_) peer_ = peers_.accept();
    // The queue of the listener is full, so the kernel answers no further connection.
    for (int i = 0; i < 3; ++i) {
      waiting_.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      (void)::connect(waiting_.back().get(), host_.endpoint.address(), host_.endpoint.size());
    }
  }

  // Nothing more can be sent on the lifeline, as the peer does not read.
  void silenceLifeline() {
    const std::vector<std::byte> bytes(1 << 20);
    for (int refused = 0; refused < 10; ++refused) {
      while (::send(lifeline_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) refused = 0;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  Silence look(int times = 1) {
    for (int i = 0; i < times; ++i) {
      now_ += kPeriod;
      watch_.look(lifeline_, host_.endpoint, now_);
    }
    return watch_.silence();
  }
  void expectSilence() { EXPECT_GE(look(kLong).host, kLong / 2 * kPeriod); }
  // Whether the host is heard when it does something; the kernel may need a moment.
  bool isHeardAfter(const std::function<void()>& action) {
    for (int i = 0; i < 2000; ++i) {
      action();
      if (look().host == 0) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }

  HostWatch watch_;
  Nanoseconds now_ = 1'000'000'000'000;
  Listener peers_, host_;
  FileDescriptor lifeline_, peer_;
  std::vector<FileDescriptor> waiting_;
};

TEST_F(HostWatchTest, AHostThatAnswersNothingIsSilent) {
  silenceLifeline();
  EXPECT_EQ(look().host, 0);
  expectSilence();
  // More attempts bring no more descriptors: each is given up after a while.
  const size_t before = numOpenDescriptors();
  look(kLong);
  EXPECT_LE(numOpenDescriptors(), before);
}

TEST_F(HostWatchTest, WhatThePeerReadsIsAnAnswer) {
  silenceLifeline();
  look();
  expectSilence();
  EXPECT_TRUE(isHeardAfter([&] { readAll(peer_); }));
}

TEST_F(HostWatchTest, ANewConnectionIsAnAnswer) {
  silenceLifeline();
  look();
  expectSilence();
  EXPECT_TRUE(isHeardAfter([&] { host_.accept(); }));
}

TEST_F(HostWatchTest, ARefusedConnectionIsAnAnswer) {
  silenceLifeline();
  look();
  expectSilence();
  waiting_.clear();
  host_.socket = FileDescriptor();
  EXPECT_TRUE(isHeardAfter([] {}));
}

// A link that carries the data of other programs is slow, not broken. A connection that carries nothing says nothing.
TEST_F(HostWatchTest, WhatOtherConnectionsMoveIsAnAnswer) {
  const Listener others(ownAddress(), 8);
  const FileDescriptor sender(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::connect(sender.get(), others.endpoint.address(), others.endpoint.size()), 0);
  FileDescriptor receiver;
  while (!receiver) receiver = others.accept();
  silenceLifeline();
  look();
  expectSilence();
  EXPECT_TRUE(isHeardAfter([&] {
    EXPECT_EQ(::send(sender.get(), "", 1, 0), 1);
    readAll(receiver);
  }));
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // for a late acknowledgement
  look();
  expectSilence();
}

// The kernel of the peer's host acknowledges probes, and the process does not answer them.
TEST_F(HostWatchTest, OnlyAProcessCanBeSilentUntilItAnswers) {
  look();
  for (int i = 0; i < 2000 && watch_.silence().process < 3 * kPeriod; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    look();
  }
  EXPECT_GE(watch_.silence().process, 3 * kPeriod);
  EXPECT_EQ(watch_.silence().host, 0);
  watch_.onEcho();
  EXPECT_EQ(watch_.silence().process, 0);
}

TEST_F(HostWatchTest, NothingIsKnownOfAPause) {
  look();
  for (int i = 0; i < 2000 && watch_.silence().process < 3 * kPeriod; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    look();
  }
  silenceLifeline();
  expectSilence();
  now_ += 100 * kPeriod;
  const Silence silence = look();
  EXPECT_EQ(silence.host, 0);
  EXPECT_EQ(silence.process, 0);
}

TEST_F(HostWatchTest, WhoCannotAskHearsNoSilence) {
  silenceLifeline();
  look();
  expectSilence();
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit none{0, limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const Silence before = look(2);  // the first one looks for answers to what was asked before
  const Silence after = look(kLong);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(after.host, before.host);
  expectSilence();
}

}  // namespace
}  // namespace smddp::bootstrap
