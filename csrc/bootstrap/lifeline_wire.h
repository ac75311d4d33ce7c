// What a lifeline publishes and what it says: addresses, the hello, the goodbye.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bootstrap/process_id.h"
#include "bootstrap/seal.h"

namespace smddp::bootstrap {

// An IPv4 or IPv6 address and a port, as the socket calls want them.
struct Endpoint {
  sockaddr_storage storage{};
  sockaddr* address() { return reinterpret_cast<sockaddr*>(&storage); }
  const sockaddr* address() const { return reinterpret_cast<const sockaddr*>(&storage); }
  socklen_t size() const {
    return storage.ss_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  }
};

// Port 0 of a numeric address. Throws Usage for anything else and for the wildcard.
Endpoint parseNumericAddress(const std::string& text);

struct LifelineAddress {
  Endpoint endpoint;
  ProcessId process{};
};
std::vector<std::byte> serialise(const LifelineAddress& address);
// Throws Transport naming `description`.
LifelineAddress parseLifelineAddress(std::span<const std::byte> blob,
                                     const std::string& description);

// The first bytes in both directions. Knowing `to` is the proof of having read the store, `signature` that of
// having the job token. Processes draw their ids, so a hello is worth nothing to any other pair.
struct Hello {
  ProcessId from{}, to{};
  Digest signature{};
};
Hello signedHello(const ProcessId& from, const ProcessId& to, const Seal& seal);
bool isGenuine(const Hello& hello, const Seal& seal);
inline constexpr size_t kHelloBytes = 72;
std::vector<std::byte> serialise(const Hello& hello);
// Nothing when it is not a hello of our version. `bytes` has kHelloBytes.
std::optional<Hello> parseHello(std::span<const std::byte> bytes);

// The only bytes that may follow the hello. A probe asks for nothing but the kernel's acknowledgement.
inline constexpr std::byte kGoodbye{0x67};
inline constexpr std::byte kProbe{0x70};

}  // namespace smddp::bootstrap
