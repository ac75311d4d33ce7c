// Addresses of hosts: what the name service and the kernel's routes say.
#pragma once

#include <netdb.h>
#include <sys/socket.h>

#include <cstdint>
#include <memory>
#include <string>

namespace smddp {

struct FreeAddresses {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};
using AddressList = std::unique_ptr<addrinfo, FreeAddresses>;

// Addresses for stream sockets, at least one; or none, and why.
struct FoundAddresses {
  AddressList list;
  int failure = 0;  // of getaddrinfo(): EAI_…
  std::string why() const { return ::gai_strerror(failure); }
};

// The addresses of a host with that name, or with that numeric IPv4 or IPv6 address. Nobody is called "". It may ask
// the name service, and then takes as long as that does.
FoundAddresses lookUpHost(const std::string& host, uint16_t port);

// The numeric address itself. It never asks the name service.
FoundAddresses parseAddress(const std::string& text, uint16_t port);

// For a socket that listens on all interfaces of this machine.
FoundAddresses everyInterface(uint16_t port);

// Numeric; empty if it is neither of IPv4 nor of IPv6.
std::string printAddress(const sockaddr* address);

// Whether peers can use it: not null, IPv4 or IPv6, and not valid on one link only, because a peer does not know which.
bool isUsableByPeers(const sockaddr* address);

// The numeric address from which this machine would send to `host`. Empty if nobody knows the host or a way to it, or
// if its name means loopback only: then others would find another host. "localhost" and numeric addresses of loopback
// mean what they say. It may ask the name service, and sends nothing to the host.
std::string sourceTowards(const std::string& host);

}  // namespace smddp
