#include "common/host_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <array>

#include "common/file_descriptor.h"

namespace smddp {
namespace {

FoundAddresses find(const char* host, uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | flags;
  addrinfo* list = nullptr;
  const int failure = ::getaddrinfo(host, std::to_string(port).c_str(), &hints, &list);
  return {AddressList(failure == 0 ? list : nullptr), failure};
}

const in6_addr& addressOf6(const sockaddr* address) {
  return reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
}

bool isLoopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    return (ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr) >> 24) == 127;
  }
  return IN6_IS_ADDR_LOOPBACK(&addressOf6(address)) != 0;
}

// To connect a datagram socket sends nothing: it asks the kernel for the route.
std::string sourceTowards(const addrinfo& to) {
  const FileDescriptor probe(::socket(to.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage source{};
  socklen_t size = sizeof source;
  auto* address = reinterpret_cast<sockaddr*>(&source);
  if (!probe || ::connect(probe.get(), to.ai_addr, to.ai_addrlen) != 0 ||
      ::getsockname(probe.get(), address, &size) != 0 || !isUsableByPeers(address)) {
    return "";
  }
  return printAddress(address);
}

}  // namespace

FoundAddresses lookUpHost(const std::string& host, uint16_t port) {
  if (host.empty()) return {nullptr, EAI_NONAME};
  return find(host.c_str(), port, 0);
}

FoundAddresses parseAddress(const std::string& text, uint16_t port) {
  return find(text.c_str(), port, AI_NUMERICHOST);
}

FoundAddresses everyInterface(uint16_t port) { return find(nullptr, port, AI_PASSIVE); }

std::string printAddress(const sockaddr* address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  const void* bytes = nullptr;
  if (address == nullptr) return "";
  if (address->sa_family == AF_INET) {
    bytes = &reinterpret_cast<const sockaddr_in*>(address)->sin_addr;
  }
  if (address->sa_family == AF_INET6) bytes = &addressOf6(address);
  if (bytes == nullptr) return "";
  return ::inet_ntop(address->sa_family, bytes, text.data(), text.size()) ? text.data() : "";
}

bool isUsableByPeers(const sockaddr* address) {
  if (address == nullptr) return false;
  if (address->sa_family == AF_INET) return true;
  return address->sa_family == AF_INET6 && !IN6_IS_ADDR_LINKLOCAL(&addressOf6(address));
}

std::string sourceTowards(const std::string& host) {
  constexpr uint16_t kDiscard = 9;  // connect() wants a port
  FoundAddresses found = parseAddress(host, kDiscard);
  const bool meansLoopback = found.list != nullptr || host == "localhost";
  if (!found.list) found = lookUpHost(host, kDiscard);
  for (const addrinfo* one = found.list.get(); one != nullptr; one = one->ai_next) {
    if (isLoopback(one->ai_addr) && !meansLoopback) continue;
    if (const std::string source = sourceTowards(*one); !source.empty()) return source;
  }
  return "";
}

}  // namespace smddp
