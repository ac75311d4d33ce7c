// Chooses the congestion control of data connections over TCP: the kernel's rule for how fast the sender sends.
//
// BBR, the default of many cloud images, paces what it sends. Within a data centre and on loopback that costs up to
// half the speed and gains nothing. There a connection gets cubic or reno, if the kernel allows it. On a long path, or
// one that loses packets, a connection keeps what the system has. Each end decides for what it sends.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "common/clock.h"

namespace smddp::transport {

// What the kernel offers to new connections.
struct CongestionControls {
  std::string system;                // what they have
  std::vector<std::string> allowed;  // what this process may choose
};

// What is known about the path of one connection.
struct NetworkPath {
  Nanoseconds roundTrip = 0;  // the shortest so far; 0: not known yet
  bool isLossy = false;       // once it has lost many packets, it stays so
};

// The longest round trip of a path on which BBR is replaced. Zones of one region are 0.5 to 2 ms apart.
inline constexpr Nanoseconds kShortRoundTrip = 3'000'000;

// The name for a connection with this path. `setting` is the value of SMDDP_CONGESTION_CONTROL. Where that cannot be
// had, the connection keeps what the system has.
std::string chooseCongestionControl(const std::string& setting, const CongestionControls& controls,
                                    const NetworkPath& path);

// True if the path lost so many of these packets that it will lose more.
bool isLossy(uint64_t sent, uint64_t sentAgain);

// Names in the order in which the kernel lists them in the file; none if it cannot be read.
std::vector<std::string> allowedCongestionControls(
    const std::filesystem::path& file = "/proc/sys/net/ipv4/tcp_allowed_congestion_control");

// Sets the congestion control of sockets. Any thread may use it.
class CongestionChooser {
 public:
  // Asks the kernel what it offers. Throws nothing: where it does not tell, connections keep what they have.
  explicit CongestionChooser(std::string setting);
  CongestionChooser(std::string setting, CongestionControls controls)
      : setting_(std::move(setting)), controls_(std::move(controls)) {}

  // For a socket that is not connected: for the path that is expected. Sockets that a listener accepts inherit it.
  // To begin with BBR would leave its pacing on, whatever is set later.
  void begin(int socket) const;
  // For a connection: looks at its path, and sets what suits it. Call it again from time to time.
  void review(int socket, NetworkPath& path) const;

  const std::string& system() const { return controls_.system; }
  // What a connection with a short path has.
  std::string onShortPaths() const { return chooseCongestionControl(setting_, controls_, {}); }
  // True if the setting cannot be had, or if connections have BBR on short paths because nothing else is allowed.
  bool isHindered() const;
  // What connections have, and why, as "congestion control reno, or …".
  std::string describe() const;

 private:
  std::string setting_;
  CongestionControls controls_;
};

// The name that the socket has now; empty if the kernel does not tell.
std::string congestionControlOf(int socket);

}  // namespace smddp::transport
