#include "bootstrap/lifeline_wire.h"

#include <arpa/inet.h>

#include <algorithm>

#include "bootstrap/blob.h"
#include "common/error.h"

namespace smddp::bootstrap {
namespace {

constexpr uint8_t kAddressVersion = 1;
constexpr uint32_t kHelloMagic = 0x4c444d53;  // "SMDL"
constexpr uint32_t kHelloVersion = 3;

// The parts of an endpoint that are sent: 4 or 16 address bytes and the port, both in network order.
struct Parts {
  std::span<std::byte> bytes;
  uint16_t* port;
};

Parts partsOf(Endpoint& endpoint) {
  if (endpoint.storage.ss_family == AF_INET) {
    auto* v4 = reinterpret_cast<sockaddr_in*>(&endpoint.storage);
    return {std::as_writable_bytes(std::span(&v4->sin_addr, 1)), &v4->sin_port};
  }
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&endpoint.storage);
  return {std::as_writable_bytes(std::span(&v6->sin6_addr, 1)), &v6->sin6_port};
}

}  // namespace

Endpoint parseNumericAddress(const std::string& text) {
  for (const int family : {AF_INET, AF_INET6}) {
    Endpoint endpoint;
    endpoint.storage.ss_family = static_cast<sa_family_t>(family);
    const Parts parts = partsOf(endpoint);
    if (::inet_pton(family, text.c_str(), parts.bytes.data()) != 1) continue;
    for (const std::byte b : parts.bytes) {
      if (b != std::byte{0}) return endpoint;
    }
    raise(ErrorKind::Usage, "{} is every interface at once; peers need the address of one", text);
  }
  raise(ErrorKind::Usage, "\"{}\" is not a numeric IPv4 or IPv6 address", text);
}

std::vector<std::byte> serialise(const LifelineAddress& address) {
  Endpoint endpoint = address.endpoint;
  const Parts parts = partsOf(endpoint);
  BlobWriter writer;
  writer.number(kAddressVersion);
  writer.bytes("address", parts.bytes, 16);
  writer.number(*parts.port);
  writer.raw(address.process);
  return writer.take();
}

LifelineAddress parseLifelineAddress(std::span<const std::byte> blob,
                                     const std::string& description) {
  try {
    BlobReader reader(blob);
    if (reader.number<uint8_t>("version") != kAddressVersion) throw BlobError("unknown version");
    const auto bytes = reader.bytes("address", 16);
    if (bytes.size() != 4 && bytes.size() != 16) throw BlobError("neither IPv4 nor IPv6");
    LifelineAddress result;
    result.endpoint.storage.ss_family = bytes.size() == 4 ? AF_INET : AF_INET6;
    const Parts parts = partsOf(result.endpoint);
    std::memcpy(parts.bytes.data(), bytes.data(), bytes.size());
    *parts.port = reader.number<uint16_t>("port");
    reader.raw("processId", result.process);
    // A connection without a hello has the id 0.
    if (result.process == ProcessId{}) throw BlobError("no process has the id 0");
    reader.end();
    return result;
  } catch (const BlobError& error) {
    raise(ErrorKind::Transport, "the lifeline address of {} is malformed: {}", description,
          error.what());
  }
}

Hello signedHello(const ProcessId& from, const ProcessId& to, const Seal& seal) {
  std::array<std::byte, sizeof from + sizeof to> pair;
  std::copy(to.begin(), to.end(), std::copy(from.begin(), from.end(), pair.begin()));
  return {from, to, seal.sign("hello", pair)};
}

bool isGenuine(const Hello& hello, const Seal& seal) {
  return sameDigest(hello.signature, signedHello(hello.from, hello.to, seal).signature);
}

std::vector<std::byte> serialise(const Hello& hello) {
  BlobWriter writer;
  writer.number(kHelloMagic);
  writer.number(kHelloVersion);
  writer.raw(hello.from);
  writer.raw(hello.to);
  writer.raw(hello.signature);
  return writer.take();
}

std::optional<Hello> parseHello(std::span<const std::byte> bytes) {
  BlobReader reader(bytes);
  if (reader.number<uint32_t>("magic") != kHelloMagic) return std::nullopt;
  if (reader.number<uint32_t>("version") != kHelloVersion) return std::nullopt;
  Hello hello;
  reader.raw("from", hello.from);
  reader.raw("to", hello.to);
  reader.raw("signature", hello.signature);
  return hello;
}

}  // namespace smddp::bootstrap
