#include "transport/fabric/provider.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include "common/error.h"

namespace smddp::transport::fabric {
namespace {

// The modes that we support. A provider that demands another one is not used.
constexpr int kSupportedMrModes =
    FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT | FI_MR_HMEM;
constexpr uint64_t kSupportedModes = FI_CONTEXT | FI_CONTEXT2;

struct KnownProvider {
  const char* name;
  int order;            // lower is better
  bool automatic;       // may be chosen without being named
  const char* refusal;  // the reason why it is never used; null if it may be used
};

constexpr KnownProvider kKnownProviders[] = {
    {"efa", 0, true, nullptr},
    {"cxi", 1, true, nullptr},
    {"verbs;ofi_rxm", 2, true, nullptr},
    {"tcp", 3, false, nullptr},
    {"net", 3, false, nullptr},  // the name of tcp before 1.18
    {"tcp;ofi_rxm", 4, false, nullptr},
    {"shm", 5, false, nullptr},
    {"sockets", 9, false, "it is superseded by tcp and a thousand times slower"},
    {"udp", 9, false, "it loses messages"},
    {"ofi_rxd", 9, false, "it is not reliable under load"},
};

// The user may name any other provider.
constexpr KnownProvider kUnknownProvider{"", 8, false, nullptr};

const KnownProvider& lookUp(std::string_view provider) {
  for (const KnownProvider& known : kKnownProviders) {
    if (provider == known.name) return known;
  }
  // A layered provider is refused if one of its layers is.
  for (const KnownProvider& known : kKnownProviders) {
    if (known.refusal != nullptr && provider.find(known.name) != provider.npos) return known;
  }
  return kUnknownProvider;
}

bool isNamed(const ProviderInfo& info, const std::string& name) {
  const auto modern = [](std::string_view p) { return p == "net" ? std::string_view("tcp") : p; };
  return modern(info.provider) == modern(name);
}

bool startsWithAny(std::string_view name, std::initializer_list<const char*> prefixes) {
  return std::any_of(prefixes.begin(), prefixes.end(),
                     [&](const char* prefix) { return name.rfind(prefix, 0) == 0; });
}

// Bridges and tunnels of container runtimes: they exist on every host with the same address.
bool isVirtual(std::string_view interface) {
  return startsWithAny(
      interface, {"docker", "virbr", "br-", "cni", "veth", "cali", "flannel", "podman", "lxc"});
}

bool isLoopback(const ProviderInfo& info) {
  return info.interface == "lo" || info.address == "::1" || info.address.rfind("127.", 0) == 0;
}

// A rank of the interface; lower is better.
int interfaceRank(const ProviderInfo& info, const std::string& route,
                  const std::set<std::string>& routed) {
  if (!route.empty() && info.address == route) return 0;
  if (isLoopback(info)) return 6;
  if (!info.linkUp) return 7;
  if (startsWithAny(info.address, {"fe80:"})) return 5;
  if (isVirtual(info.interface)) return 4;
  if (routed.count(info.interface)) return 1;
  return info.address.find(':') == std::string::npos ? 2 : 3;  // IPv4 before IPv6
}

// The names in one line, or `none` if there are none.
template <typename Names>
std::string joined(const Names& names, const char* separator, const char* none) {
  std::string text;
  for (const auto& name : names) {
    if (!text.empty()) text += separator;
    text += name;
  }
  return text.empty() ? none : text;
}

std::string listOf(const std::set<std::string>& names) { return joined(names, ", ", "nothing"); }

std::string whyUnusable(const ProviderInfo& info) {
  if (const char* refusal = lookUp(info.provider).refusal) return refusal;
  if (info.mrMode & ~kSupportedMrModes)
    return "it demands a memory registration mode that smddp does not have";
  if (info.mode & ~kSupportedModes)
    return "it demands an application mode that smddp does not have";
  if (info.mrKeyBytes > sizeof(uint64_t)) return "its memory keys are longer than 8 bytes";
  if (!(info.caps & FI_MSG)) return "it has no messages";
  return "";
}

[[noreturn]] void raiseNothingUsable(const std::vector<ProviderInfo>& offered,
                                     const Options& options) {
  std::set<std::string> names, interfaces;
  for (const ProviderInfo& info : offered) {
    // SMDDP_PROVIDER=sockets means smddp's own TCP transport, not this.
    if (info.provider == "sockets") continue;
    const std::string why = whyUnusable(info);
    names.insert(why.empty() ? info.provider
                             : fmt::format("{} (not used: {})", info.provider, why));
    if (!info.interface.empty()) interfaces.insert(info.interface);
    if (info.interface.empty()) interfaces.insert(info.domain);
  }
  const bool providerThere =
      std::any_of(offered.begin(), offered.end(), [&](const ProviderInfo& info) {
        return whyUnusable(info).empty() &&
               (options.provider.empty() ? lookUp(info.provider).automatic
                                         : isNamed(info, options.provider));
      });
  if (!options.interface.empty() && providerThere)
    raise(ErrorKind::Usage,
          "SMDDP_INTERFACE={} names an interface that {} does not offer here; there is {}",
          options.interface, options.provider.empty() ? "libfabric" : options.provider,
          listOf(interfaces));
  if (!options.provider.empty())
    raise(ErrorKind::Usage,
          "SMDDP_PROVIDER={} names a provider that libfabric does not offer here; there is {}; "
          "and sockets, which needs no libfabric. Unset it to let smddp choose, or see "
          "`fi_info -p '{}'`",
          options.provider, listOf(names), options.provider);
  raise(ErrorKind::Usage, "libfabric offers no card that smddp can use between nodes; there is {}",
        listOf(names));
}

// True if SMDDP_INTERFACE allows this offer. A name of the kernel's interface does not exclude cards without one; the
// name of a card (its domain) excludes all others.
bool interfaceAllowed(const ProviderInfo& info, const std::string& wanted, bool namesCard) {
  if (wanted.empty()) return true;
  if (namesCard) return info.domain == wanted;
  return info.interface.empty() || info.interface == wanted;
}

std::string explain(const ProviderInfo& info, const Options& options, int rank) {
  std::string why =
      options.provider.empty() ? "first of the known providers" : "provider by SMDDP_PROVIDER";
  if (!options.interface.empty() && !info.interface.empty())
    why += ", interface by SMDDP_INTERFACE";
  else if (!info.interface.empty() && rank <= 1)
    why += ", interface that routes to MASTER_ADDR";
  else if (!info.interface.empty())
    why += ", first interface, bridges and loopback last";
  for (int i = 0; i < info.relaxed; ++i) why += fmt::format(", without {}", kRelaxations[i]);
  return why;
}

}  // namespace

// From libfabric's source: efa_rdm_rma_should_write_using_rdma(), efa_rdm_ope_post_remote_write(),
// efa_base_ep_write_eq_error(), efa_rdm_ep_wait_send() up to 2.4, efa_rdm_trywait() from 2.5 on.
Quirks quirksOf(const std::string& provider) {
  if (provider != "efa") return {};
  return {.writesOnePiece = true,
          .maxWriteBytes = size_t{1} << 30,
          .needsEventQueue = true,
          .closeBlocks = true,
          .needsPolling = true};
}

bool ProviderInfo::reachesDevices() const { return (caps & FI_HMEM) != 0; }

Protocol protocolOf(const ProviderInfo& info, const Options& options) {
  const bool usable =
      (info.caps & FI_RMA) && info.cqDataBytes >= sizeof(uint32_t) && !info.emulatedWrite;
  return options.rma && usable ? Protocol::Write : Protocol::Send;
}

Choice choose(const std::vector<ProviderInfo>& offered, const Options& options,
              const std::string& route) {
  std::set<std::string> routed;
  bool namesCard = false, namesInterface = false;
  for (const ProviderInfo& info : offered) {
    if (!route.empty() && info.address == route) routed.insert(info.interface);
    if (info.interface.empty() && info.domain == options.interface) namesCard = true;
    if (info.interface == options.interface) namesInterface = true;
  }
  if (!options.interface.empty() && !namesCard && !namesInterface)
    raiseNothingUsable(offered, options);

  // By provider, then by variant, relaxations, memory of devices, and interface.
  using Score = std::tuple<int, int, int, int, int>;
  std::optional<Score> best;
  std::vector<size_t> equals;
  std::set<std::string> domains;  // libfabric offers the same card more than once
  for (size_t i = 0; i < offered.size(); ++i) {
    const ProviderInfo& info = offered[i];
    const KnownProvider& known = lookUp(info.provider);
    if (!whyUnusable(info).empty()) continue;
    if (options.provider.empty() ? !known.automatic : !isNamed(info, options.provider)) continue;
    if (!interfaceAllowed(info, options.interface, namesCard)) continue;
    // efa-direct is the same card without the software layer, which we need for messages.
    const int variant = info.fabric == "efa-direct" ? 1 : 0;
    const Score score{known.order, variant, info.relaxed, info.reachesDevices() ? 0 : 1,
                      interfaceRank(info, route, routed)};
    if (!best || score < *best) {
      best = score;
      equals.clear();
      domains.clear();
    }
    if (score == *best && domains.insert(info.domain).second) equals.push_back(i);
  }
  if (!best) raiseNothingUsable(offered, options);
  // Cards without an interface are equal, so the ranks of a node divide them. Interfaces are not equal: all ranks must
  // use the same network.
  Choice choice{equals.front(), {}, ""};
  if (offered[choice.index].interface.empty()) {
    const auto rank = static_cast<size_t>(options.localRank);
    choice.index = equals[rank % equals.size()];
    const auto ranks = static_cast<size_t>(std::max(options.localSize, 0));
    for (size_t i = rank + ranks; ranks > 0 && i < equals.size(); i += ranks) {
      choice.more.push_back(equals[i]);
    }
  }
  choice.why = explain(offered[choice.index], options, std::get<4>(*best));
  return choice;
}

std::string describe(const ProviderInfo& info, Protocol protocol, const std::string& why) {
  constexpr std::pair<int, const char*> kBits[] = {
      {FI_MR_LOCAL, "local"},       {FI_MR_VIRT_ADDR, "virt_addr"}, {FI_MR_ALLOCATED, "allocated"},
      {FI_MR_PROV_KEY, "prov_key"}, {FI_MR_ENDPOINT, "endpoint"},   {FI_MR_HMEM, "hmem"}};
  std::vector<const char*> bits;
  for (const auto& [bit, name] : kBits) {
    if (info.mrMode & bit) bits.push_back(name);
  }
  const std::string place = info.interface.empty()
                                ? fmt::format("domain {}", info.domain)
                                : fmt::format("interface {} ({})", info.interface, info.address);
  return fmt::format("{} {}.{}, {}, mr_mode {}, {}{}; {}", info.provider, FI_MAJOR(info.version),
                     FI_MINOR(info.version), place, joined(bits, "|", "none"), toString(protocol),
                     info.reachesDevices() ? ", reaches memory of devices" : "", why);
}

}  // namespace smddp::transport::fabric
