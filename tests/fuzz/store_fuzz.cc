// Fuzzes what strangers send to the store's port, and what a false store answers.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cstdlib>
#include <optional>
#include <string>

#include "common/error.h"
#include "script.h"
#include "store/client.h"
#include "store/frames.h"
#include "store/server.h"

namespace {

using namespace smddp;
using namespace smddp::store;
using smddp::fuzz::Script;

constexpr const char* kHost = "127.0.0.1";
constexpr Nanoseconds kPatience = 60'000'000'000;

void check(bool right) {
  if (!right) std::abort();
}

// What is accepted is what would be written.
void frames(Script& script) {
  const size_t count = script.byte();
  const auto bytes = script.rest();
  const auto matches = [](std::span<const std::byte> one, std::span<const std::byte> other) {
    return std::ranges::equal(one, other);
  };
  if (const auto request = parseRequest(bytes)) {
    const Bytes again = serialise(*request);
    check(lengthOf(again) == bytes.size());
    check(matches(std::span(again).subspan(kLengthBytes), bytes));
  }
  if (const auto values = parseValues(bytes, count)) {
    check(values->size() == count);
    bootstrap::BlobWriter again;
    for (const Bytes& value : *values) appendValue(again, value);
    check(matches(again.take(), bytes));
  }
}

sockaddr_in addressOf(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  ::inet_pton(AF_INET, kHost, &address.sin_addr);
  return address;
}

void write(const FileDescriptor& socket, std::span<const std::byte> bytes) {
  // What does not fit is lost, which is one more case.
  if (!bytes.empty()) {
    (void)::send(socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  }
}

// A server serves a rank whatever a stranger sends before, in between, and without an end.
void server(Script& script) {
  const Server server(kHost, 0);
  const FileDescriptor stranger(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in address = addressOf(server.port());
  if (::connect(stranger.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return;
  }
  const bool isCut = script.byte() % 2 == 0;
  while (!script.done()) write(stranger, script.piece());
  if (isCut) {
    // The server closes the connection when it has read all, so nothing of this input is left to be read.
    (void)::shutdown(stranger.get(), SHUT_WR);
    std::array<char, 4096> answer{};
    while (::recv(stranger.get(), answer.data(), answer.size(), 0) > 0) {
    }
  }
  Client rank(kHost, server.port(), kPatience);
  rank.set("a key of a rank", Bytes(3));
  check(rank.get("a key of a rank", kPatience) == Bytes(3));
}

// A rank gets an error or a value from a false store, and does not wait.
void client(Script& script) {
  const FileDescriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = addressOf(0);
  socklen_t size = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (::bind(listener.get(), generic, size) != 0 || ::listen(listener.get(), 1) != 0 ||
      ::getsockname(listener.get(), generic, &size) != 0) {
    return;
  }
  Client rank(kHost, ntohs(address.sin_port), kPatience);
  FileDescriptor store(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  const uint8_t what = script.byte();
  write(store, script.rest());
  (void)::shutdown(store.get(), SHUT_WR);
  switch (what % 4) {
    case 0: rank.set("key", Bytes(3)); break;
    case 1: rank.add("key", 1); break;
    case 2: rank.contains("key"); break;
    case 3: check(rank.multiGet({"key", "other"}, 0).size() == 2); break;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Script script(data, size);
  try {
    switch (script.byte() % 8) {
      case 0: server(script); break;
      case 1: client(script); break;
      default: frames(script); break;  // a hundred times as quick
    }
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::Internal) std::abort();
  }
  return 0;
}
