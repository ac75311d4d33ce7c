// Chooses provider, interface and protocol among those that the machine offers.
//
// discovery.h asks libfabric and the kernel. The functions here are pure, so that tests can check the choice for
// hardware that the machine does not have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/seal.h"

namespace smddp::transport::fabric {

// The quirks of a provider: where it differs from libfabric's manual, or from all other providers.
struct Quirks {
  // It silently emulates a write with immediate data by sends if the write has more than one piece.
  bool writesOnePiece = false;
  // A longer write reports its immediate data more than once.
  size_t maxWriteBytes = SIZE_MAX;
  // It ends the process if it has an error to report and there is no event queue.
  bool needsEventQueue = false;
  // To close an endpoint may block while a peer does not answer.
  bool closeBlocks = false;
  // The descriptor of its completion queue may fail to wake a sleeper, so the queue must be polled.
  bool needsPolling = false;
};
Quirks quirksOf(const std::string& provider);

// Requests of the user, or of a test. An empty text leaves the choice to us.
struct Options {
  std::string provider;
  std::string interface;
  std::string masterAddress;  // a host that every rank can reach; determines the interface
  int localRank = 0;          // spreads the ranks of a node over equal network cards
  int localSize = 0;          // the number of ranks that share them; 0: unknown, each takes one
  bool rma = true;            // false: never use remote writes
  bool devices = false;       // prefer a provider that can send from memory of devices
  Seal seal{};                // proves to peers that this process belongs to the job
  // For tests: the provider also demands this mr_mode, takes at most this number of pieces, and has the quirks of
  // another provider.
  int extraMrMode = 0;
  size_t iovLimit = SIZE_MAX;
  std::string quirksLike;
};

// One way to communicate, as fi_getinfo offers it.
struct ProviderInfo {
  std::string provider;   // "tcp;ofi_rxm"
  std::string fabric;     // "efa", "192.0.2.0/24"
  std::string domain;     // "eth0", "rdmap16s27-rdm"
  std::string interface;  // the kernel's network interface; empty for a card that has none
  std::string address;    // the numeric IP address; empty for a card that has none
  uint32_t version = 0;
  uint64_t caps = 0;
  uint64_t mode = 0;
  int mrMode = 0;
  size_t mrKeyBytes = 8;
  size_t cqDataBytes = 8;
  size_t iovLimit = 1;
  size_t maxMessageBytes = SIZE_MAX;
  bool linkUp = true;
  // The number of kRelaxations that were needed until the provider was offered.
  int relaxed = 0;
  // Remote writes are emulated by sends. Known only when an endpoint is open.
  bool emulatedWrite = false;
  Quirks quirks;

  // True if it can send from memory of devices. libfabric says so only if asked (FI_HMEM).
  bool reachesDevices() const;
  bool writesOnePiece() const { return quirks.writesOnePiece || iovLimit < 2; }
};

// The requirements that are given up, in this order, if a provider does not fulfil all of them.
inline constexpr const char* kRelaxations[] = {"manual progress", "one thread per domain",
                                               "remote writes"};

enum class Protocol : uint8_t { Write, Send };
constexpr const char* toString(Protocol protocol) {
  return protocol == Protocol::Write ? "remote writes" : "sends into posted receives";
}

// Remote writes if the provider has real ones with immediate data; else sends.
Protocol protocolOf(const ProviderInfo& info, const Options& options);

struct Choice {
  size_t index = 0;  // in the list of offers
  // More cards for this rank, if the node has more equal cards than ranks.
  std::vector<size_t> more;
  std::string why;
};

// `route` is the numeric address of our interface that routes to the master; empty if unknown.
// Throws Usage if a named provider or interface is missing, or if nothing is usable. The text lists what there is.
Choice choose(const std::vector<ProviderInfo>& offered, const Options& options,
              const std::string& route);

// "net 117.0, interface eth0 (192.0.2.2), mr_mode none, remote writes; why"
std::string describe(const ProviderInfo& info, Protocol protocol, const std::string& why);

}  // namespace smddp::transport::fabric
