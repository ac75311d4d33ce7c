// Which provider, interface and protocol: a pure choice among what the machine offers.
//
// discovery.h asks libfabric and the kernel; everything here works on plain values, so that tests can judge
// the choice for hardware that is not there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace smddp::transport::fabric {

// Where a provider differs from what libfabric's pages say, or from all others.
struct Peculiarities {
  // A write with immediate data that has more pieces is made of sends, which nobody is told.
  bool writesOnePiece = false;
  // Longer writes report their immediate data more than once.
  size_t mostWriteBytes = SIZE_MAX;
  // What it can tell nobody ends the process.
  bool needsEventQueue = false;
  // To close an endpoint may take as long as a peer does not answer.
  bool closeWaits = false;
  // Who sleeps on the descriptor of its queue may not be woken.
  bool mustBeLookedAt = false;
};
Peculiarities peculiaritiesOf(const std::string& provider);

// What a user or a test may ask for; empty or true leaves the choice to us.
struct Options {
  std::string provider;
  std::string interface;
  std::string masterAddress;  // host that every rank can reach; decides the interface
  int localRank = 0;          // spreads the ranks of a node over equal network cards
  int localSize = 0;          // how many share them; 0: unknown, each takes one
  bool rma = true;            // false: never use remote writes
  bool devices = false;       // to send from memory of devices, where the provider can
  // For tests: as if the provider demanded this mr_mode too, took no more pieces than that, and had the peculiarities
  // of that other one.
  int extraMrMode = 0;
  size_t iovLimit = SIZE_MAX;
  std::string asPeculiarAs;
};

// One way to communicate, as fi_getinfo offers it.
struct ProviderInfo {
  std::string provider;   // "tcp;ofi_rxm"
  std::string fabric;     // "efa", "192.0.2.0/24"
  std::string domain;     // "eth0", "rdmap16s27-rdm"
  std::string interface;  // kernel's network interface; empty for a card that has none
  std::string address;    // numeric IP address; empty likewise
  uint32_t version = 0;
  uint64_t caps = 0;
  uint64_t mode = 0;
  int mrMode = 0;
  size_t mrKeyBytes = 8;
  size_t cqDataBytes = 8;
  size_t iovLimit = 1;
  size_t maxMessageBytes = SIZE_MAX;
  bool linkUp = true;
  // How many of kRelaxations were needed before the provider answered.
  int relaxed = 0;
  // Remote writes exist but are made of sends; known only once an endpoint is open.
  bool emulatedWrite = false;
  Peculiarities peculiarities;

  // Offered only to those who ask.
  bool reachesDevices() const;
  bool writesOnePiece() const { return peculiarities.writesOnePiece || iovLimit < 2; }
};

// What is given up, in this order, when a provider does not answer to the full wish.
inline constexpr const char* kRelaxations[] = {"manual progress", "one thread per domain",
                                               "remote writes"};

enum class Protocol : uint8_t { Write, Send };
constexpr const char* toString(Protocol protocol) {
  return protocol == Protocol::Write ? "remote writes" : "sends into posted receives";
}

// Remote writes with immediate data where the provider really has them.
Protocol protocolOf(const ProviderInfo& info, const Options& options);

struct Choice {
  size_t index = 0;  // into the list that was given
  // Cards like it that nobody else takes: where a node has more of them than ranks.
  std::vector<size_t> more;
  std::string why;
};

// `route` is our own numeric address on the way to the master, empty when unknown.
// Throws Usage when a named provider or interface is missing, or when nothing is usable; the text lists what
// there is.
Choice choose(const std::vector<ProviderInfo>& offered, const Options& options,
              const std::string& route);

// "net 117.0, interface eth0 (192.0.2.2), mr_mode none, remote writes; why"
std::string describe(const ProviderInfo& info, Protocol protocol, const std::string& why);

}  // namespace smddp::transport::fabric
