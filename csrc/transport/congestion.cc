#include "transport/congestion.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <string_view>

#include <fmt/format.h>

#include "common/file_descriptor.h"

namespace smddp::transport {
namespace {

// The values of SMDDP_CONGESTION_CONTROL that are no names of the kernel's.
constexpr std::string_view kAuto = "auto", kSystem = "system";

bool isAllowed(const CongestionControls& controls, std::string_view name) {
  return std::find(controls.allowed.begin(), controls.allowed.end(), name) !=
         controls.allowed.end();
}

// Later versions have names such as bbr2.
bool isPaced(std::string_view name) { return name.starts_with("bbr"); }

bool set(int socket, const std::string& name) {
  return ::setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(),
                      static_cast<socklen_t>(name.size())) == 0;
}

}  // namespace

std::string chooseCongestionControl(const std::string& setting, const CongestionControls& controls,
                                    const NetworkPath& path) {
  if (setting == kSystem) return controls.system;
  if (setting != kAuto) return isAllowed(controls, setting) ? setting : controls.system;
  if (!isPaced(controls.system) || path.isLossy || path.roundTrip > kShortRoundTrip) {
    return controls.system;
  }
  for (const char* name : {"cubic", "reno"}) {
    if (isAllowed(controls, name)) return name;
  }
  return controls.system;
}

bool isLossy(uint64_t sent, uint64_t sentAgain) {
  // Cubic and reno lose some packets of a short path by filling its queue: up to a few of a thousand.
  constexpr uint64_t kEnough = 1000, kTolerated = 100;
  return sent >= kEnough && sentAgain >= sent / kTolerated;
}

std::vector<std::string> allowedCongestionControls(const std::filesystem::path& file) {
  std::ifstream names(file);
  return {std::istream_iterator<std::string>(names), {}};
}

std::string congestionControlOf(int socket) {
  std::array<char, 64> name{};
  socklen_t size = name.size() - 1;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(), &size) != 0) return "";
  return name.data();
}

CongestionChooser::CongestionChooser(std::string setting) : setting_(std::move(setting)) {
  controls_.allowed = allowedCongestionControls();
  for (const int family : {AF_INET, AF_INET6}) {
    const FileDescriptor probe(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!probe) continue;
    controls_.system = congestionControlOf(probe.get());
    // An administrator may choose more than the list has.
    const bool isName = setting_ != kAuto && setting_ != kSystem;
    if (isName && !isAllowed(controls_, setting_) && set(probe.get(), setting_)) {
      controls_.allowed.push_back(setting_);
    }
    return;
  }
}

void CongestionChooser::begin(int socket) const {
  if (const std::string name = onShortPaths(); name != controls_.system) (void)set(socket, name);
}

void CongestionChooser::review(int socket, NetworkPath& path) const {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return;
  // Before the first acknowledgement of data the kernel has that of the handshake.
  const bool isMeasured = info.tcpi_min_rtt != 0 && info.tcpi_min_rtt != ~0U;
  const Nanoseconds now = 1000 * Nanoseconds{isMeasured ? info.tcpi_min_rtt : info.tcpi_rtt};
  if (now != 0) path.roundTrip = path.roundTrip == 0 ? now : std::min(path.roundTrip, now);
  path.isLossy |= transport::isLossy(info.tcpi_data_segs_out, info.tcpi_total_retrans);
  const std::string name = chooseCongestionControl(setting_, controls_, path);
  if (!name.empty() && name != congestionControlOf(socket)) (void)set(socket, name);
}

bool CongestionChooser::isHindered() const {
  if (setting_ == kSystem) return false;
  const std::string name = onShortPaths();
  return setting_ == kAuto ? isPaced(name) : name != setting_;
}

std::string CongestionChooser::describe() const {
  const std::string& system = controls_.system;
  if (system.empty()) return "congestion control unknown";
  const std::string name = onShortPaths();
  if (setting_ != kAuto && setting_ != kSystem) {
    if (!isHindered()) return fmt::format("congestion control {}", name);
    return fmt::format("congestion control {}, the system's, because {} is not allowed here",
                       system, setting_);
  }
  if (isHindered()) {
    return fmt::format(
        "congestion control {}, the system's, because neither cubic nor reno is allowed here",
        system);
  }
  if (name == system) return fmt::format("congestion control {}, the system's", system);
  return fmt::format(
      "congestion control {}; {}, the system's, where a round trip takes more than {} ms or many "
      "packets are lost",
      name, system, kShortRoundTrip / 1'000'000);
}

}  // namespace smddp::transport
