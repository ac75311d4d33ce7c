#include "bootstrap/local_address.h"

#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <fstream>
#include <memory>
#include <optional>
#include <set>
#include <system_error>

#include "common/error.h"
#include "common/file_descriptor.h"

namespace smddp::bootstrap {
namespace {

struct AddressDeleter {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
  void operator()(ifaddrs* list) const { ::freeifaddrs(list); }
};
using AddressList = std::unique_ptr<addrinfo, AddressDeleter>;

AddressList resolve(const std::string& name, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_DGRAM;
  hints.ai_flags = flags;
  addrinfo* list = nullptr;
  if (::getaddrinfo(name.c_str(), "9", &hints, &list) != 0) return nullptr;
  return AddressList(list);
}

socklen_t sizeOfAddress(const sockaddr* address) {
  return address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
}

std::string print(const sockaddr* address) {
  std::array<char, NI_MAXHOST> text{};
  const int failed = ::getnameinfo(address, sizeOfAddress(address), text.data(), text.size(),
                                   nullptr, 0, NI_NUMERICHOST);
  return failed != 0 ? "" : text.data();
}

// Link-local IPv6 addresses are valid on one link only, and a peer does not know which.
bool isUsable(const sockaddr* address) {
  if (address == nullptr) return false;
  if (address->sa_family == AF_INET) return true;
  if (address->sa_family != AF_INET6) return false;
  return !IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

bool isLoopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    return (ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr) >> 24) == 127;
  }
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr) != 0;
}

using Path = std::filesystem::path;

std::vector<Path> entriesOf(const Path& folder) {
  std::error_code none;
  const std::filesystem::directory_iterator entries(folder, none);
  return none ? std::vector<Path>{} : std::vector<Path>(begin(entries), end(entries));
}

// The network interfaces of a card that libfabric drives; null if this is no card. EFA's domains are the name of the
// card and "-rdm" or "-dgrm".
std::optional<std::set<std::string>> interfacesOfCard(const Path& classes,
                                                      const std::string& domain) {
  std::error_code ignored;
  if (domain.find('/') != std::string::npos) return std::nullopt;
  if (std::filesystem::exists(classes / "cxi" / domain, ignored)) return std::set<std::string>{};
  const Path card = classes / "infiniband" / domain.substr(0, domain.find('-'));
  if (!std::filesystem::exists(card, ignored)) return std::nullopt;
  std::set<std::string> names;
  for (const Path& port : entriesOf(card / "ports")) {
    for (const Path& entry : entriesOf(port / "gid_attrs" / "ndevs")) {
      std::string name;
      if (std::ifstream(entry) >> name) names.insert(name);
    }
  }
  return names;
}

std::string joined(const std::set<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += " " + name;
  return text;
}

// Empty: the name is that of a card without an interface.
std::string addressOfInterface(const std::string& name, const Path& classes) {
  ifaddrs* raw = nullptr;
  if (::getifaddrs(&raw) != 0) raiseErrno(ErrorKind::Resource, "cannot list network interfaces");
  const std::unique_ptr<ifaddrs, AddressDeleter> list(raw);
  std::string found;
  std::set<std::string> names;
  for (const ifaddrs* entry = raw; entry != nullptr; entry = entry->ifa_next) {
    if (!isUsable(entry->ifa_addr)) continue;
    names.insert(entry->ifa_name);
    // Prefer IPv4: the peers' interfaces most likely have it, too.
    if (name == entry->ifa_name && (found.empty() || entry->ifa_addr->sa_family == AF_INET)) {
      found = print(entry->ifa_addr);
      if (entry->ifa_addr->sa_family == AF_INET) break;
    }
  }
  if (!found.empty()) return found;
  const auto ofCard = interfacesOfCard(classes, name);
  if (ofCard && ofCard->empty()) return "";
  if (ofCard) {
    raise(ErrorKind::Usage,
          "SMDDP_INTERFACE={}: this is a card; set the variable to the card's interface:{}", name,
          joined(*ofCard));
  }
  raise(ErrorKind::Usage,
        "SMDDP_INTERFACE={}: there is no such interface with an address; there is{}", name,
        joined(names));
}

// The source address that the kernel would choose for `to`. To connect a datagram socket sends nothing.
std::string sourceTowards(const sockaddr* to) {
  const FileDescriptor probe(::socket(to->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage source{};
  socklen_t size = sizeof(source);
  auto* address = reinterpret_cast<sockaddr*>(&source);
  if (!probe || ::connect(probe.get(), to, sizeOfAddress(to)) != 0 ||
      ::getsockname(probe.get(), address, &size) != 0 || !isUsable(address)) {
    return "";
  }
  return print(address);
}

std::string addressOfDefaultRoute() {
  // These addresses are reserved for documentation. No network has them, so the default route applies.
  for (const char* nowhere : {"192.0.2.1", "2001:db8::1"}) {
    const auto list = resolve(nowhere, AI_NUMERICHOST);
    if (list == nullptr) continue;
    if (const std::string source = sourceTowards(list->ai_addr); !source.empty()) return source;
  }
  return "";
}

}  // namespace

std::string localAddress(const Settings& settings, const std::string& masterAddress,
                         const Path& classes) {
  constexpr const char* kLoopback = "127.0.0.1";
  if (!settings.interface.empty()) {
    const std::string address = addressOfInterface(settings.interface, classes);
    if (!address.empty()) return address;
  }
  if (masterAddress.empty() || masterAddress == "localhost") return kLoopback;

  const bool isNumeric = resolve(masterAddress, AI_NUMERICHOST) != nullptr;
  const auto list = resolve(masterAddress, isNumeric ? AI_NUMERICHOST : 0);
  for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
    if (isLoopback(entry->ai_addr) && !isNumeric) continue;
    if (const std::string source = sourceTowards(entry->ai_addr); !source.empty()) return source;
  }
  if (const std::string source = addressOfDefaultRoute(); !source.empty()) return source;
  return kLoopback;
}

}  // namespace smddp::bootstrap
