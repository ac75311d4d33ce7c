#include "transport/fabric/fabric.h"

#include <algorithm>
#include <charconv>

#include "common/config.h"
#include "common/error.h"
#include "transport/fabric/discovery.h"
#include "transport/fabric/fabric_transport.h"

namespace smddp::transport::fabric {
namespace {

Options optionsFromSettings() {
  Options options;
  options.provider = settings().provider;
  options.interface = settings().interface;
  options.masterAddress = environment("MASTER_ADDR");
  options.rma = settings().fabricRma;
  const std::string rank = environment("LOCAL_RANK");
  // Without a launcher there is one rank, or nobody to share the cards with.
  int parsed = 0;
  const auto [end, error] = std::from_chars(rank.data(), rank.data() + rank.size(), parsed);
  if (error == std::errc() && end == rank.data() + rank.size() && parsed >= 0)
    options.localRank = parsed;
  return options;
}

Choice chooseFrom(const Discovery& found, const Options& options) {
  return choose(found.offered, options, routeTo(options.masterAddress));
}

}  // namespace

std::unique_ptr<Transport> create() { return create(optionsFromSettings()); }

std::unique_ptr<Transport> create(const Options& options) {
  Discovery found = discover();
  const Choice choice = chooseFrom(found, options);
  ProviderInfo& chosen = found.offered[choice.index];
  chosen.mrMode |= options.extraMrMode;
  chosen.iovLimit = std::min(chosen.iovLimit, options.iovLimit);
  return std::make_unique<FabricTransport>(*found.raw[choice.index], chosen, choice.why, options);
}

bool available(std::string* why) {
  try {
    chooseFrom(discover(), optionsFromSettings());
    return true;
  } catch (const Error& error) {
    if (why != nullptr) *why = error.what();
    return false;
  }
}

}  // namespace smddp::transport::fabric
