// The bytes of lifelines: the published address, the hello, the goodbye, the probe and its echo, the verdict on a
// silent host.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bootstrap/process_id.h"
#include "common/seal.h"

namespace smddp::bootstrap {

// An IPv4 or IPv6 address and a port, for socket calls.
struct Endpoint {
  sockaddr_storage storage{};
  sockaddr* address() { return reinterpret_cast<sockaddr*>(&storage); }
  const sockaddr* address() const { return reinterpret_cast<const sockaddr*>(&storage); }
  socklen_t size() const {
    return storage.ss_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  }
};

// Parses a numeric address; the port is 0. Throws Usage for any other text, and for the wildcard address.
Endpoint parseNumericAddress(const std::string& text);

struct LifelineAddress {
  Endpoint endpoint;
  ProcessId process{};
};
std::vector<std::byte> serialise(const LifelineAddress& address);
// Throws Transport naming `description`.
LifelineAddress parseLifelineAddress(std::span<const std::byte> blob,
                                     const std::string& description);

// The first bytes in both directions. `to` proves that the sender has read the store; `signature` proves that it has
// the job token. Ids are random, so a hello is useless for any other pair.
struct Hello {
  ProcessId from{}, to{};
  Digest signature{};
};
Hello signedHello(const ProcessId& from, const ProcessId& to, const Seal& seal);
bool isGenuine(const Hello& hello, const Seal& seal);
inline constexpr size_t kHelloBytes = 72;
std::vector<std::byte> serialise(const Hello& hello);
// nullopt if it is not a hello of our version. `bytes` has kHelloBytes.
std::optional<Hello> parseHello(std::span<const std::byte> bytes);

// The only bytes that may follow the hello. The kernel acknowledges a probe, and the process answers it with an echo.
inline constexpr std::byte kGoodbye{0x67};
inline constexpr std::byte kProbe{0x70};
inline constexpr std::byte kEcho{0x65};
// The sender had no answer from the receiver's host, and takes it for lost. Arrives if only one direction is cut off.
inline constexpr std::byte kGivenUp{0x75};

}  // namespace smddp::bootstrap
