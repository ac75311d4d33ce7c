#include "transport/fabric/fabric.h"

#include <algorithm>
#include <charconv>

#include "common/error.h"
#include "common/host_address.h"
#include "transport/fabric/discovery.h"
#include "transport/fabric/fabric_transport.h"
#include "transport/fabric/library.h"
#include "transport/striped_transport.h"

namespace smddp::transport::fabric {
namespace {

// The number in a launcher's variable; 0 if it is unset or not a number.
int numberIn(const char* variable) {
  const std::string text = environment(variable);
  int parsed = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), parsed);
  const bool isNumber = error == std::errc() && end == text.data() + text.size() && parsed >= 0;
  return isNumber ? parsed : 0;
}

Options optionsFrom(const Settings& settings) {
  Options options;
  options.provider = settings.provider;
  options.interface = settings.interface;
  options.masterAddress = environment("MASTER_ADDR");
  options.rma = settings.fabricRma;
  options.devices = settings.gpuDirect;
  options.seal = Seal(settings.jobToken.text);
  // Without a launcher's variables this rank takes one card, and does not share the cards of the node.
  options.localRank = numberIn("LOCAL_RANK");
  options.localSize = numberIn("LOCAL_WORLD_SIZE");
  return options;
}

}  // namespace

std::unique_ptr<Transport> create(const Settings& settings) {
  return create(optionsFrom(settings));
}

std::unique_ptr<Transport> create(const Options& options) {
  Discovery found = discover(options.devices);
  const Choice choice = choose(found.offered, options, sourceTowards(options.masterAddress));
  std::vector<size_t> indices{choice.index};
  indices.insert(indices.end(), choice.more.begin(), choice.more.end());
  std::vector<std::unique_ptr<Transport>> cards;
  for (const size_t index : indices) {
    ProviderInfo& chosen = found.offered[index];
    chosen.mrMode |= options.extraMrMode;
    chosen.iovLimit = std::min(chosen.iovLimit, options.iovLimit);
    chosen.quirks = quirksOf(options.quirksLike.empty() ? chosen.provider : options.quirksLike);
    chosen.maxMessageBytes = std::min(chosen.maxMessageBytes, chosen.quirks.maxWriteBytes);
    cards.push_back(
        std::make_unique<FabricTransport>(*found.raw[index], chosen, choice.why, options));
  }
  if (cards.size() == 1) return std::move(cards.front());
  return std::make_unique<StripedTransport>(std::move(cards));
}

std::string whyMissing() {
  try {
    static_cast<void>(library());
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace smddp::transport::fabric
