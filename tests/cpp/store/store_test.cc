// The store's server and clients, and what they send each other.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "common/error.h"
#include "store/client.h"
#include "store/frames.h"
#include "store/server.h"

namespace smddp::store {
namespace {

constexpr Nanoseconds kSecond = 1'000'000'000;
constexpr const char* kHost = "127.0.0.1";

Bytes bytesOf(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

std::span<const std::byte> restOf(const Bytes& frame) {
  EXPECT_EQ(lengthOf(frame), frame.size() - kLengthBytes);
  return std::span(frame).subspan(kLengthBytes);
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
  Bytes rest;
  appendValue(rest, bytesOf("one"));
  appendValue(rest, {});
  EXPECT_EQ(parseValues(rest, 2), (std::vector<Bytes>{bytesOf("one"), {}}));
  EXPECT_FALSE(parseValues(rest, 1));
  EXPECT_FALSE(parseValues(rest, 3));
  rest.pop_back();
  EXPECT_FALSE(parseValues(rest, 2));
}

TEST(Store, KeepsValuesAndCounts) {
  const Server server(kHost, 0);
  Client one(kHost, server.port(), kSecond), other(kHost, server.port(), kSecond);
  EXPECT_FALSE(other.contains("key"));
  one.set("key", bytesOf("value"));
  EXPECT_TRUE(other.contains("key"));
  EXPECT_EQ(other.get("key", kSecond), bytesOf("value"));
  one.set("key", bytesOf("new"));
  EXPECT_EQ(other.get("key", kSecond), bytesOf("new"));
  EXPECT_EQ(one.add("n", 0), 0);
  EXPECT_EQ(one.add("n", 5), 5);
  EXPECT_EQ(other.add("n", -2), 3);
  EXPECT_TRUE(one.containsAll({"key", "n"}));
  EXPECT_FALSE(one.containsAll({"key", "absent"}));
  const Bytes large(size_t{3} << 20, std::byte{7});
  one.set("large", large);
  EXPECT_EQ(other.multiGet({"large", "key"}, kSecond), (std::vector{large, bytesOf("new")}));
}

TEST(Store, AGetWaitsForItsValue) {
  const Server server(kHost, 0);
  Client one(kHost, server.port(), kSecond), other(kHost, server.port(), kSecond);
  EXPECT_EQ(kindOf([&] { one.get("key", kSecond / 20); }), ErrorKind::Timeout);
  std::jthread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    other.set("key", bytesOf("value"));
  });
  EXPECT_EQ(one.get("key", 10 * kSecond), bytesOf("value"));
}

TEST(Store, ManyThreadsCountTogether) {
  const Server server(kHost, 0);
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 8; ++i) {
      threads.emplace_back([&] {
        Client client(kHost, server.port(), 10 * kSecond);
        for (int n = 0; n < 200; ++n) client.add("n", 1);
      });
    }
  }
  EXPECT_EQ(Client(kHost, server.port(), kSecond).add("n", 0), 1600);
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
  Client client(kHost, port, 10 * kSecond);
  client.set("key", bytesOf("value"));
  later.join();
  server.reset();
  EXPECT_EQ(kindOf([&] { client.set("key", bytesOf("value")); }), ErrorKind::PeerLost);
  EXPECT_EQ(kindOf([&] { client.contains("key"); }), ErrorKind::PeerLost);
}

TEST(Store, APortIsTakenAndAHostUnknown) {
  const Server server(kHost, 0);
  EXPECT_EQ(kindOf([&] { const Server second(kHost, server.port()); }), ErrorKind::Transport);
  EXPECT_EQ(kindOf([&] { const Server second("no-such-host.invalid", 0); }), ErrorKind::Usage);
}

TEST(Store, StrangersAreDisconnectedAndOthersServed) {
  const Server server(kHost, 0);
  Client client(kHost, server.port(), kSecond);
  client.set("key", bytesOf("value"));
  for (const std::string& data :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string("\xff\xff\xff\x7f"),
        std::string("\x04\0\0\0\x09\x01\0\0", 8), std::string("\x01")}) {
    const FileDescriptor stranger(::socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(server.port());
    ::inet_pton(AF_INET, kHost, &address.sin_addr);
    ASSERT_EQ(::connect(stranger.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    ASSERT_EQ(::send(stranger.get(), data.data(), data.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(data.size()));
    if (data.size() > kLengthBytes - 1) {
      char byte = 0;
      EXPECT_LE(::recv(stranger.get(), &byte, 1, 0), 0);  // closed
    }
    EXPECT_EQ(client.get("key", kSecond), bytesOf("value"));
  }
}

}  // namespace
}  // namespace smddp::store
