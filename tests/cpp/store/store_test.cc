// The store's server and clients, and what they send each other.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "common/clock.h"
#include "common/error.h"
#include "common/interrupt.h"
#include "store/client.h"
#include "store/frames.h"
#include "store/server.h"
#include "support/watchdog.h"

namespace smddp::store {
namespace {

constexpr Nanoseconds kSecond = 1'000'000'000;
// Of calls that succeed: the machine may be busy.
constexpr Nanoseconds kPatience = 60 * kSecond;
constexpr Nanoseconds kForever = 3600 * kSecond;  // longer than the watchdog waits
constexpr const char* kHost = "127.0.0.1";

Bytes bytesOf(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

std::span<const std::byte> restOf(const Bytes& frame) {
  EXPECT_EQ(lengthOf(frame), frame.size() - kLengthBytes);
  return std::span(frame).subspan(kLengthBytes);
}

sockaddr_in addressOf(const char* host, uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  ::inet_pton(AF_INET, host, &address.sin_addr);
  return address;
}

ErrorKind kindOf(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.kind();
  }
  ADD_FAILURE() << "no error";
  return ErrorKind::Internal;
}

TEST(Frames, RequestsComeBackAsTheyWere) {
  for (const Request& request :
       {Request{RequestKind::Set, {"a"}, bytesOf("value")}, Request{RequestKind::Set, {""}, {}},
        Request{RequestKind::Add, {"n"}, Bytes(8)}, Request{RequestKind::Get, {"a", "", "c"}, {}},
        Request{RequestKind::Check, {std::string(1000, 'k')}, {}}}) {
    const Bytes frame = serialise(request);
    const auto parsed = parseRequest(restOf(frame));
    ASSERT_TRUE(parsed);
    EXPECT_EQ(parsed->kind, request.kind);
    EXPECT_EQ(parsed->keys, request.keys);
    EXPECT_EQ(parsed->value, request.value);
  }
}

TEST(Frames, WhatIsCutOffOrChangedIsNoRequestOrAnother) {
  const Bytes frame = serialise({RequestKind::Get, {"first", "second"}, {}});
  const auto rest = restOf(frame);
  for (size_t length = 0; length < rest.size(); ++length) {
    EXPECT_FALSE(parseRequest(rest.first(length))) << length;
  }
  for (size_t at = 0; at < rest.size(); ++at) {
    Bytes changed(rest.begin(), rest.end());
    changed[at] = std::byte{0xff};
    const auto parsed = parseRequest(changed);  // sanitizers watch
    EXPECT_TRUE(!parsed || parsed->keys.size() == 2);
  }
  EXPECT_FALSE(parseRequest(restOf(serialise({RequestKind::Add, {"n"}, Bytes(7)}))));
  EXPECT_FALSE(parseRequest(restOf(serialise({RequestKind::Set, {"a", "b"}, Bytes(7)}))));
  EXPECT_FALSE(parseRequest(restOf(serialise({RequestKind::Check, {}, {}}))));
}

TEST(Frames, ValuesComeBackAsTheyWere) {
  bootstrap::BlobWriter writer;
  appendValue(writer, bytesOf("one"));
  appendValue(writer, {});
  Bytes rest = writer.take();
  EXPECT_EQ(parseValues(rest, 2), (std::vector<Bytes>{bytesOf("one"), {}}));
  EXPECT_FALSE(parseValues(rest, 1));
  EXPECT_FALSE(parseValues(rest, 3));
  rest.pop_back();
  EXPECT_FALSE(parseValues(rest, 2));
}

TEST(Store, KeepsValuesAndCounts) {
  const Server server(kHost, 0);
  Client one(kHost, server.port(), kPatience), other(kHost, server.port(), kPatience);
  EXPECT_FALSE(other.contains("key"));
  one.set("key", bytesOf("value"));
  EXPECT_TRUE(other.contains("key"));
  EXPECT_EQ(other.get("key", kPatience), bytesOf("value"));
  one.set("key", bytesOf("new"));
  EXPECT_EQ(other.get("key", kPatience), bytesOf("new"));
  EXPECT_EQ(one.add("n", 0), 0);
  EXPECT_EQ(one.add("n", 5), 5);
  EXPECT_EQ(other.add("n", -2), 3);
  EXPECT_TRUE(one.containsAll({"key", "n"}));
  EXPECT_FALSE(one.containsAll({"key", "absent"}));
  const Bytes large(size_t{3} << 20, std::byte{7});
  one.set("large", large);
  EXPECT_EQ(other.multiGet({"large", "key"}, kPatience), (std::vector{large, bytesOf("new")}));
}

TEST(Store, AGetWaitsForItsValue) {
  const Server server(kHost, 0);
  Client one(kHost, server.port(), kPatience), other(kHost, server.port(), kPatience);
  EXPECT_EQ(kindOf([&] { one.get("key", kSecond / 20); }), ErrorKind::Timeout);
  std::jthread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    other.set("key", bytesOf("value"));
  });
  EXPECT_EQ(one.get("key", kPatience), bytesOf("value"));
}

TEST(Store, ManyThreadsCountTogether) {
  const Server server(kHost, 0);
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 8; ++i) {
      threads.emplace_back([&] {
        Client client(kHost, server.port(), kPatience);
        for (int n = 0; n < 200; ++n) client.add("n", 1);
      });
    }
  }
  EXPECT_EQ(Client(kHost, server.port(), kPatience).add("n", 0), 1600);
}

TEST(Store, AClientComesBeforeTheServerOrNever) {
  uint16_t port = 0;
  { port = Server(kHost, 0).port(); }
  EXPECT_EQ(kindOf([&] { Client(kHost, port, kSecond / 10); }), ErrorKind::Timeout);
  std::unique_ptr<Server> server;
  std::jthread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    server = std::make_unique<Server>(kHost, port);
  });
  Client client(kHost, port, kPatience);
  client.set("key", bytesOf("value"));
  later.join();
  server.reset();
  EXPECT_EQ(kindOf([&] { client.set("key", bytesOf("value")); }), ErrorKind::PeerLost);
  EXPECT_EQ(kindOf([&] { client.contains("key"); }), ErrorKind::PeerLost);
  server = std::make_unique<Server>(kHost, port);
  EXPECT_FALSE(client.contains("key"));  // by another connection
}

// A socket at which connections wait for an accept() that does not come.
FileDescriptor silentListener(const char* host, uint16_t port, int backlog) {
  FileDescriptor listener(::socket(AF_INET, SOCK_STREAM, 0));
  const sockaddr_in address = addressOf(host, port);
  const int yes = 1;
  EXPECT_EQ(::setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes), 0);
  EXPECT_EQ(::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(::listen(listener.get(), backlog), 0);
  return listener;
}

struct Signal {};

// While it lives, every wait is interrupted.
struct Interruption {
  Interruption() {
    setInterruptCheck([] { throw Signal(); });
  }
  ~Interruption() { setInterruptCheck(nullptr); }
};

// A rank that was interrupted says so in the store.
TEST(Store, ACallAfterAnInterruptedOneIsServed) {
  uint16_t port = 0;
  { port = Server(kHost, 0).port(); }
  auto silent = silentListener(kHost, port, 10);
  Client client(kHost, port, kPatience);
  std::optional<Server> server;
  {
    const Interruption interruption;
    EXPECT_THROW(client.contains("key"), Signal);
    silent = {};
    server.emplace(kHost, port);
    client.set("key", bytesOf("value"));
  }
  EXPECT_EQ(Client(kHost, port, kPatience).get("key", kPatience), bytesOf("value"));
}

TEST(Store, AServerLingersUntilItsClientsHaveComeAndGone) {
  const test::Watchdog watchdog;
  const Server server(kHost, 0);
  server.linger(0, kForever);
  server.linger(1, kSecond / 20);  // nobody comes
  std::atomic<bool> isOver = false;
  std::jthread lingers([&] {
    server.linger(1, kForever);
    isOver = true;
  });
  const auto staysFor = [&](std::chrono::milliseconds time) {
    std::this_thread::sleep_for(time);
    EXPECT_FALSE(isOver);
  };
  staysFor(std::chrono::milliseconds(20));
  {
    Client client(kHost, server.port(), kPatience);
    client.set("key", bytesOf("value"));
    staysFor(std::chrono::milliseconds(20));
  }
  lingers.join();
  server.linger(1, kForever);  // it has come and gone
}

// --- the name service: the test's own getaddrinfo() --------------------------------------------------------

// What each look-up of "rank0.test" returns, the last again and again: a failure, or the addresses.
struct LookUp {
  int failure = 0;
  std::vector<const char*> addresses;
};
std::vector<LookUp> lookUps;

TEST(Names, AreWaitedForUntilTheNameServiceKnowsThem) {
  const Server server(kHost, 0);
  const LookUp good{0, {kHost}};
  for (const int failure : {EAI_AGAIN, EAI_NONAME}) {
    lookUps = {{failure, {}}, {failure, {}}, good};
    Client("rank0.test", server.port(), 20 * kSecond).set("key", bytesOf("value"));
    EXPECT_EQ(lookUps.size(), 1U);
    lookUps = {{failure, {}}, good};
    EXPECT_NE(Server("rank0.test", 0, 20 * kSecond).port(), 0);
    lookUps = {{failure, {}}};
    EXPECT_EQ(kindOf([&] { Client("rank0.test", server.port(), kSecond / 5); }), ErrorKind::Usage);
  }
  lookUps = {{EAI_FAIL, {}}, good};
  EXPECT_EQ(kindOf([&] { Client("rank0.test", server.port(), 20 * kSecond); }), ErrorKind::Usage);
}

TEST(Names, AnAddressThatDropsPacketsLeavesTimeForTheOthers) {
  constexpr const char* kOther = "127.0.0.2";
  const Server server(kHost, 0);
  // Its queue is full, so the kernel drops whatever comes.
  const auto full = silentListener(kOther, server.port(), 0);
  std::vector<FileDescriptor> queued;
  for (int i = 0; i < 3; ++i) {
    queued.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    const sockaddr_in address = addressOf(kOther, server.port());
    (void)::connect(queued.back().get(), reinterpret_cast<const sockaddr*>(&address),
                    sizeof address);
  }
  EXPECT_EQ(kindOf([&] { Client(kOther, server.port(), kSecond / 5); }), ErrorKind::Timeout);
  lookUps = {{0, {kOther, kHost}}};
  // Without a share for the second address, each attempt uses all of its time at the first one. With it, an attempt
  // does so only on a machine that stands still for two seconds; then another one counts.
  const MonotonicClock clock;
  bool hasTimeLeft = false;
  for (int attempt = 0; attempt < 20 && !hasTimeLeft; ++attempt) {
    const Deadline deadline = Deadline::after(clock, 4 * kSecond);
    Client("rank0.test", server.port(), 4 * kSecond).set("key", bytesOf("value"));
    hasTimeLeft = !deadline.passed(clock);
  }
  EXPECT_TRUE(hasTimeLeft);
}

// The reply would have 64 GiB.
TEST(Store, AValueThatIsNamedManyTimesIsNotCopiedManyTimes) {
  const Server server(kHost, 0);
  Client client(kHost, server.port(), kPatience);
  client.set("key", Bytes(1 << 20));
  const std::vector<std::string> names(UINT16_MAX, "key");
  EXPECT_EQ(kindOf([&] { client.multiGet(names, kPatience); }), ErrorKind::PeerLost);
  EXPECT_EQ(client.get("key", kPatience).size(), size_t{1} << 20);
}

TEST(Store, APortIsTakenAndAHostUnknown) {
  const Server server(kHost, 0);
  EXPECT_EQ(kindOf([&] { const Server second(kHost, server.port()); }), ErrorKind::Transport);
  EXPECT_EQ(kindOf([&] { const Server second("no-such-host.invalid", 0); }), ErrorKind::Usage);
}

TEST(Store, StrangersAreDisconnectedAndOthersServed) {
  const Server server(kHost, 0);
  Client client(kHost, server.port(), kPatience);
  client.set("key", bytesOf("value"));
  for (const std::string& data :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string("\xff\xff\xff\x7f"),
        std::string("\x04\0\0\0\x09\x01\0\0", 8), std::string("\x01")}) {
    const FileDescriptor stranger(::socket(AF_INET, SOCK_STREAM, 0));
    const sockaddr_in address = addressOf(kHost, server.port());
    ASSERT_EQ(
        ::connect(stranger.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    ASSERT_EQ(::send(stranger.get(), data.data(), data.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(data.size()));
    if (data.size() > kLengthBytes - 1) {
      char byte = 0;
      EXPECT_LE(::recv(stranger.get(), &byte, 1, 0), 0);  // closed
    }
    EXPECT_EQ(client.get("key", kPatience), bytesOf("value"));
  }
}

}  // namespace

int lookUp(const char* host, const char* port, const addrinfo* hints, addrinfo** found) {
  static const auto real =
      reinterpret_cast<decltype(&::getaddrinfo)>(::dlsym(RTLD_NEXT, "getaddrinfo"));
  if (!host || std::string_view(host) != "rank0.test") return real(host, port, hints, found);
  const LookUp now = lookUps.front();
  if (lookUps.size() > 1) lookUps.erase(lookUps.begin());
  addrinfo** end = found;
  for (const char* address : now.addresses) {
    const int failure = real(address, port, hints, end);
    if (failure != 0) return failure;
    while (*end) end = &(*end)->ai_next;
  }
  return now.failure;
}

}  // namespace smddp::store

extern "C" int getaddrinfo(const char* host, const char* port, const addrinfo* hints,
                           addrinfo** found) {
  return smddp::store::lookUp(host, port, hints, found);
}
