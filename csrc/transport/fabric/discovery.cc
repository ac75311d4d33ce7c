#include "transport/fabric/discovery.h"

#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <string>

#include "common/config.h"
#include "common/host_address.h"
#include "common/log.h"

namespace smddp::transport::fabric {
namespace {

struct Interface {
  std::string name;
  bool up;
};

std::map<std::string, Interface> interfacesByAddress() {
  std::map<std::string, Interface> found;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return found;  // then the order of the providers decides alone
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, &freeifaddrs);
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    const std::string address = printAddress(entry->ifa_addr);
    const bool up = (entry->ifa_flags & IFF_UP) && (entry->ifa_flags & IFF_RUNNING);
    if (!address.empty()) found[address] = {entry->ifa_name, up};
  }
  return found;
}

// Asks for version 1.18 of the API if the library has it, whatever our headers are: from 1.18 on EFA uses the writes of
// the card by default. Newer libraries then behave like 1.18.
uint32_t apiVersion() {
  return std::min(library().version(), static_cast<uint32_t>(FI_VERSION(1, 18)));
}

InfoPtr hintsAfter(int relaxations, bool devices) {
  InfoPtr hints(library().dupInfo(nullptr));
  if (!hints) raise(ErrorKind::Resource, "fi_allocinfo: out of memory");
  hints->caps = FI_MSG | (relaxations >= 3 ? 0 : FI_RMA) | (devices ? FI_HMEM : 0);
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode =
      FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
  if (devices) hints->domain_attr->mr_mode |= FI_MR_HMEM;
  hints->domain_attr->data_progress = relaxations >= 1 ? FI_PROGRESS_UNSPEC : FI_PROGRESS_MANUAL;
  hints->domain_attr->control_progress = hints->domain_attr->data_progress;
  hints->domain_attr->threading = relaxations >= 2 ? FI_THREAD_UNSPEC : FI_THREAD_DOMAIN;
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->domain_attr->av_type = FI_AV_TABLE;
  // We need no order of messages.
  hints->tx_attr->msg_order = 0;
  hints->rx_attr->msg_order = 0;
  return hints;
}

// Kernels before 5.13 do not support fork() with registered memory, unless the providers are told before their first
// use.
void makeForkSafe() {
  static const bool done = [] {
    int failed = ::setenv("RDMAV_FORK_SAFE", "1", /*overwrite=*/0);
    // EFA ends the process if both variables are set.
    if (environment("FI_EFA_USE_HUGE_PAGE").empty()) {
      failed |= ::setenv("FI_EFA_FORK_SAFE", "1", /*overwrite=*/0);
    }
    if (failed != 0) SMDDP_LOG(Warn, "transport/fabric", "FI_EFA_FORK_SAFE could not be set");
    return true;
  }();
  static_cast<void>(done);
}

ProviderInfo describeInfo(const fi_info& info, const std::map<std::string, Interface>& interfaces,
                          int relaxed) {
  ProviderInfo result;
  const auto text = [](const char* s) { return std::string(s ? s : ""); };
  result.provider = text(info.fabric_attr->prov_name);
  result.fabric = text(info.fabric_attr->name);
  result.domain = text(info.domain_attr->name);
  result.version = info.fabric_attr->prov_version;
  result.caps = info.caps;
  result.mode = info.mode;
  result.mrMode = info.domain_attr->mr_mode;
  result.mrKeyBytes = info.domain_attr->mr_key_size;
  result.cqDataBytes = info.domain_attr->cq_data_size;
  result.iovLimit = info.tx_attr->iov_limit;
  result.maxMessageBytes = info.ep_attr->max_msg_size;
  result.relaxed = relaxed;
  if (info.addr_format == FI_SOCKADDR_IN || info.addr_format == FI_SOCKADDR_IN6 ||
      info.addr_format == FI_SOCKADDR) {
    result.address = printAddress(static_cast<const sockaddr*>(info.src_addr));
    const auto found = interfaces.find(result.address);
    if (found != interfaces.end())
      result.interface = found->second.name, result.linkUp = found->second.up;
  }
  if (info.nic && info.nic->link_attr && info.nic->link_attr->state == FI_LINK_DOWN)
    result.linkUp = false;
  return result;
}

}  // namespace

Discovery discover(bool devices) {
  makeForkSafe();

  Discovery found;
  const auto interfaces = interfacesByAddress();
  const auto ask = [&](int relaxed, bool forDevices) {
    const InfoPtr hints = hintsAfter(relaxed, forDevices);
    fi_info* list = nullptr;
    const int result = library().getInfo(apiVersion(), nullptr, nullptr, 0, hints.get(), &list);
    if (result == -FI_ENODATA) return;
    check(result, "fi_getinfo");
    found.lists.emplace_back(list);
    for (const fi_info* info = list; info != nullptr; info = info->next) {
      found.offered.push_back(describeInfo(*info, interfaces, relaxed));
      found.raw.push_back(info);
    }
  };
  for (int relaxed = 0; relaxed <= static_cast<int>(std::size(kRelaxations)); ++relaxed) {
    if (devices) ask(relaxed, true);
    ask(relaxed, false);
  }
  return found;
}

}  // namespace smddp::transport::fabric
