#include "transport/tcp/tcp_transport.h"

#include "transport/striped_transport.h"
#include "transport/transport_suite.h"

namespace smddp::transport::testing {
namespace {

Kind kindOf(const std::string& name, const std::string& host, int numCards = 1) {
  return {
      name, [=](int count) {
        std::vector<std::unique_ptr<Transport>> transports;
        for (int i = 0; i < count; ++i) {
          std::vector<std::unique_ptr<Transport>> cards;
          for (int card = 0; card < numCards; ++card) {
            cards.push_back(std::make_unique<tcp::TcpTransport>(tcp::Options{host, Seal("token")}));
          }
          if (numCards == 1) {
            transports.push_back(std::move(cards.front()));
          } else {
            transports.push_back(std::make_unique<StripedTransport>(std::move(cards)));
          }
        }
        return std::make_unique<HeapFixture>(std::move(transports));
      }};
}

INSTANTIATE_TEST_SUITE_P(Tcp, TransportSuite,
                         ::testing::Values(kindOf("IPv4", "127.0.0.1"), kindOf("IPv6", "::1"),
                                           kindOf("two_cards", "127.0.0.1", 2)),
                         kindName);

}  // namespace
}  // namespace smddp::transport::testing
