#include "bootstrap/local_address.h"

#include <ifaddrs.h>

#include <fstream>
#include <memory>
#include <optional>
#include <set>
#include <system_error>

#include "common/error.h"
#include "common/host_address.h"

namespace smddp::bootstrap {
namespace {

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
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> list(raw, &::freeifaddrs);
  std::string found;
  std::set<std::string> names;
  for (const ifaddrs* entry = raw; entry != nullptr; entry = entry->ifa_next) {
    if (!isUsableByPeers(entry->ifa_addr)) continue;
    names.insert(entry->ifa_name);
    // Prefer IPv4: the peers' interfaces most likely have it, too.
    if (name == entry->ifa_name && (found.empty() || entry->ifa_addr->sa_family == AF_INET)) {
      found = printAddress(entry->ifa_addr);
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

std::string addressOfDefaultRoute() {
  // These addresses are reserved for documentation. No network has them, so the default route applies.
  for (const char* nowhere : {"192.0.2.1", "2001:db8::1"}) {
    if (const std::string source = sourceTowards(nowhere); !source.empty()) return source;
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
  if (const std::string source = sourceTowards(masterAddress); !source.empty()) return source;
  if (const std::string source = addressOfDefaultRoute(); !source.empty()) return source;
  return kLoopback;
}

}  // namespace smddp::bootstrap
