// Fuzzes what arrives on a TCP connection, and addresses.
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <vector>

#include "common/error.h"
#include "script.h"
#include "transport/tcp/connection.h"

namespace {

using namespace smddp;
using namespace smddp::transport;
using namespace smddp::transport::tcp;
using smddp::fuzz::Script;

// The sanitizer guards the memory on both sides.
class Memory final : public Receiver {
 public:
  std::span<std::byte> slotFor(const FrameHeader& frame) override {
    return placeIn(std::array{std::span(bytes_)}, frame);
  }
  std::span<std::byte> placeFor(const FrameHeader& frame, size_t payloadBytes) override {
    if (frame.immediate % 2 == 0) return {};
    posted_.resize(payloadBytes);
    return posted_;
  }
  // Frees what was posted.
  void withdrawFrom(Connection& connection) {
    connection.withdraw(posted_);
    posted_ = {};
  }
  void onControlFrame(Bytes message) override {
    if (message.size() > kMaxControlBytes) std::abort();
  }
  void onPutFrame(const FrameHeader& frame) override {
    if (frame.length > bytes_.size()) std::abort();
  }

 private:
  std::vector<std::byte> bytes_{200};
  std::vector<std::byte> posted_;
};

void addresses(Script& script) {
  const auto bytes = script.rest();
  const Address address = decodeAddress(bytes);
  const auto again = encode(address);
  if (!std::equal(again.begin(), again.end(), bytes.begin(), bytes.end())) std::abort();
}

void write(int socket, Bytes bytes) {
  // What does not fit is lost, which is one more case.
  if (!bytes.empty()) (void)::send(socket, bytes.data(), bytes.size(), MSG_DONTWAIT);
}

void stream(Script& script) {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends.data()) != 0) return;
  const FileDescriptor peer(ends[0]);
  Connection connection{FileDescriptor(ends[1])};
  Memory memory;
  bool isGreeted = script.byte() % 2 == 0;
  while (!script.done() && connection.failure().empty()) {
    const uint8_t what = script.byte();
    if (what % 2 == 0) {
      write(peer.get(), script.piece());
    } else {
      // A put that a peer could make, and its bytes.
      FrameHeader frame{FrameKind::Put,
                        script.byte(),
                        kHeaderBytes + script.byte() % 160u,
                        {{0, 1}, script.byte() % 220u}};
      write(peer.get(), std::as_bytes(std::span(&frame, 1)));
      write(peer.get(), script.piece());
    }
    connection.markReadable();
    Hello hello;
    if (!isGreeted) isGreeted = connection.receiveHello(hello);
    while (isGreeted && connection.receive(memory)) {
    }
    if (what % 5 == 0) memory.withdrawFrom(connection);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Script script(data, size);
  try {
    if (script.byte() % 4 == 0) {
      addresses(script);
    } else {
      stream(script);
    }
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::Internal) std::abort();
  }
  return 0;
}
