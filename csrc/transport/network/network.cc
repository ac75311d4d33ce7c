#include "transport/network/network.h"

#include <system_error>

#include "common/error.h"
#include "common/log.h"
#include "transport/congestion.h"
#include "transport/fabric/fabric.h"
#include "transport/tcp/tcp_transport.h"

namespace smddp::transport::network {

bool hasCard(const std::filesystem::path& classes) {
  // EFA's driver, too, registers its cards as InfiniBand.
  for (const char* kind : {"infiniband", "cxi"}) {
    std::error_code unreadable;
    const std::filesystem::directory_iterator cards(classes / kind, unreadable);
    if (cards != end(cards)) return true;
  }
  return false;
}

std::unique_ptr<Transport> open(const Settings& settings, const std::string& host) {
  const std::string& provider = settings.provider;
  const bool isNamed = !provider.empty();
  if (isNamed ? provider != tcp::kProvider : hasCard()) {
    try {
      return fabric::create(settings);
    } catch (const Error& error) {
      if (isNamed || error.kind() != ErrorKind::Usage) throw;
      SMDDP_LOG(
          Warn, "transport",
          "this host has a network card (efa, cxi or verbs), and TCP sockets are used, because "
          "{}. SMDDP_PROVIDER=sockets says that you want this",
          error.what());
    }
  }
  CongestionChooser chooser(settings.congestionControl);
  if (settings.congestionControl != "auto" && chooser.isHindered()) {
    SMDDP_LOG(Warn, "transport", "{} (SMDDP_CONGESTION_CONTROL)", chooser.describe());
  }
  return std::make_unique<tcp::TcpTransport>(
      tcp::Options{.host = host,
                   .reason = isNamed ? "by SMDDP_PROVIDER" : "no usable efa, cxi or verbs card",
                   .seal = Seal(settings.jobToken.text),
                   .hostTimeout = fromSeconds(settings.hostTimeout),
                   .congestion = std::move(chooser)});
}

}  // namespace smddp::transport::network
