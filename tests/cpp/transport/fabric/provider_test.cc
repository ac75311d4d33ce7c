#include "transport/fabric/provider.h"

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include <gmock/gmock.h>

#include <functional>

#include "common/error.h"

namespace smddp::transport::fabric {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr uint64_t kCaps = FI_MSG | FI_RMA | FI_TAGGED;

ProviderInfo ip(const std::string& provider, const std::string& interface,
                const std::string& address) {
  ProviderInfo info;
  info.provider = provider;
  info.fabric = address + "/24";
  info.domain = interface;
  info.interface = interface;
  info.address = address;
  info.version = FI_VERSION(117, 0);
  info.caps = kCaps;
  info.iovLimit = 4;
  return info;
}

ProviderInfo card(const std::string& provider, const std::string& fabric, const std::string& domain,
                  int mrMode) {
  ProviderInfo info;
  info.provider = provider;
  info.fabric = fabric;
  info.domain = domain;
  info.caps = kCaps;
  info.mrMode = mrMode;
  info.iovLimit = 4;
  return info;
}

ProviderInfo efa(const std::string& domain, const std::string& fabric = "efa") {
  ProviderInfo info =
      card("efa", fabric, domain, FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY);
  info.cqDataBytes = 4;
  info.mode = fabric == "efa-direct" ? FI_CONTEXT2 : 0;
  return info;
}

using Offer = std::vector<ProviderInfo>;

Offer operator+(Offer a, const Offer& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// What `fi_info` lists on Debian 12 with one network card, in its order.
Offer debian12() {
  Offer offer;
  for (const char* provider : {"tcp;ofi_rxm", "net", "net;ofi_rxm", "udp;ofi_rxd", "sockets"}) {
    offer.push_back(ip(provider, "eth0", "192.0.2.2"));
    offer.push_back(ip(provider, "eth0", "fe80::fc:ff:fe00:1"));
    offer.push_back(ip(provider, "eth0", "2001:db8::2"));
    offer.push_back(ip(provider, "lo", "127.0.0.1"));
    offer.push_back(ip(provider, "lo", "::1"));
  }
  offer.push_back(card("shm", "shm", "shm", FI_MR_VIRT_ADDR));
  return offer;
}

Offer modernTcp(const std::string& interface, const std::string& address) {
  return {ip("tcp", interface, address), ip("tcp;ofi_rxm", interface, address)};
}

Options named(const std::string& provider, const std::string& interface = "") {
  Options options;
  options.provider = provider;
  options.interface = interface;
  return options;
}

const ProviderInfo& chosen(const Offer& offer, const Options& options = {},
                           const std::string& route = "") {
  return offer[choose(offer, options, route).index];
}

std::string usageErrorOf(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::Usage);
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

TEST(Provider, WithoutACardNoneIsChosenUnasked) {
  EXPECT_THAT(usageErrorOf([] { choose(debian12(), {}, ""); }), HasSubstr("offers no card"));
}

TEST(Provider, Debian12UsesNetOnTheNetworkCard) {
  const Offer offer = debian12();
  EXPECT_EQ(chosen(offer, named("tcp")).provider, "net");
  EXPECT_EQ(chosen(offer, named("tcp")).address, "192.0.2.2");
}

TEST(Provider, OrderIsEfaCxiVerbs) {
  // The worst one comes first, so that the order of the list does not give the right result.
  Offer offer = debian12();
  const auto expectAdded = [&](const ProviderInfo& better) {
    offer.push_back(better);
    EXPECT_EQ(chosen(offer).provider, better.provider);
    EXPECT_EQ(chosen(offer).domain, better.domain);
  };
  ProviderInfo verbs = ip("verbs;ofi_rxm", "ib0", "10.1.0.4");
  verbs.domain = "mlx5_0";
  verbs.mrMode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  expectAdded(verbs);
  expectAdded(card("cxi", "cxi", "cxi0", FI_MR_ENDPOINT | FI_MR_ALLOCATED));
  expectAdded(efa("rdmap16s27-rdm"));
}

TEST(Provider, CardThatNeedsRelaxedHintsStillBeatsTcp) {
  ProviderInfo late = efa("efa_0-rdm");
  late.relaxed = 2;
  const Offer offer = modernTcp("eth0", "10.0.0.7") + Offer{late};
  const Choice choice = choose(offer, {}, "");
  EXPECT_EQ(offer[choice.index].provider, "efa");
  EXPECT_THAT(choice.why, HasSubstr("without manual progress, without one thread per domain"));
}

TEST(Provider, LessRelaxedEntryOfTheSameCardWins) {
  ProviderInfo full = efa("efa_0-rdm"), relaxed = full;
  relaxed.relaxed = 1;
  EXPECT_EQ(chosen({relaxed, full}).relaxed, 0);
}

// If memory of devices is asked for, libfabric offers providers for it in addition to the others.
TEST(Provider, CardReachesDevicesWhereItCanAndIsNotPassedOverWhereItCannot) {
  ProviderInfo far = efa("rdmap0");
  far.caps |= FI_HMEM;
  far.mrMode |= FI_MR_HMEM;
  EXPECT_EQ(choose({efa("rdmap0"), far}, {}, "").index, 1u);
  ProviderInfo farTcp = ip("tcp", "eth0", "192.0.2.2");
  farTcp.caps |= FI_HMEM;
  EXPECT_EQ(choose({farTcp, efa("rdmap0")}, {}, "").index, 1u);
  ProviderInfo lessWell = far;
  lessWell.relaxed = 1;
  EXPECT_EQ(choose({efa("rdmap0"), lessWell}, {}, "").index, 0u);
}

TEST(Provider, P4dWithoutRdmaWriteSends) {
  ProviderInfo p4d = efa("rdmap16s27-rdm");
  EXPECT_EQ(protocolOf(p4d, {}), Protocol::Write);
  p4d.emulatedWrite = true;
  EXPECT_EQ(protocolOf(p4d, {}), Protocol::Send);
}

TEST(Provider, ProtocolFollowsCapabilityAndWish) {
  ProviderInfo info = ip("tcp", "eth0", "10.0.0.1");
  EXPECT_EQ(protocolOf(info, {}), Protocol::Write);
  Options without;
  without.rma = false;
  EXPECT_EQ(protocolOf(info, without), Protocol::Send);
  info.caps = FI_MSG;
  EXPECT_EQ(protocolOf(info, {}), Protocol::Send);
  info.caps = kCaps;
  info.cqDataBytes = 2;
  EXPECT_EQ(protocolOf(info, {}), Protocol::Send) << "no room for the immediate value";
}

TEST(Provider, RanksOfANodeShareTheCardsOfP5) {
  Offer offer = modernTcp("eth0", "10.0.0.7");
  for (int i = 0; i < 32; ++i) {
    offer.push_back(efa("rdmap" + std::to_string(i) + "s0-rdm"));
    offer.push_back(efa("rdmap" + std::to_string(i) + "s0-rdm", "efa-direct"));
  }
  for (int localRank : {0, 1, 31, 33}) {
    Options options;
    options.localRank = localRank;
    EXPECT_EQ(chosen(offer, options).domain, "rdmap" + std::to_string(localRank % 32) + "s0-rdm");
    EXPECT_EQ(chosen(offer, options).fabric, "efa");
  }
}

TEST(Provider, SpareCardsAreDividedAmongTheRanks) {
  Offer offer = modernTcp("eth0", "10.0.0.7");
  for (int i = 0; i < 7; ++i) offer.push_back(efa("card" + std::to_string(i)));
  const auto cardsOf = [&](int localRank, int localSize) {
    Options options;
    options.localRank = localRank;
    options.localSize = localSize;
    const Choice choice = choose(offer, options, "");
    std::vector<std::string> cards{offer[choice.index].domain};
    for (const size_t index : choice.more) cards.push_back(offer[index].domain);
    return cards;
  };
  EXPECT_THAT(cardsOf(0, 3), ElementsAre("card0", "card3", "card6"));
  EXPECT_THAT(cardsOf(1, 3), ElementsAre("card1", "card4"));
  EXPECT_THAT(cardsOf(2, 3), ElementsAre("card2", "card5"));
  // There are at least as many ranks as cards, or their number is unknown.
  EXPECT_THAT(cardsOf(6, 7), ElementsAre("card6"));
  EXPECT_THAT(cardsOf(9, 16), ElementsAre("card2"));
  EXPECT_THAT(cardsOf(1, 0), ElementsAre("card1"));
}

TEST(Provider, RanksOfANodeUseTheSameInterface) {
  const Offer offer = {ip("tcp", "eth0", "10.0.0.7"), ip("tcp", "eth1", "10.1.0.7")};
  Options options = named("tcp");
  options.localRank = 1;
  EXPECT_EQ(chosen(offer, options).interface, "eth0");
}

TEST(Provider, CardWhoseLinkIsDownComesLast) {
  ProviderInfo down = efa("efa_0-rdm");
  down.linkUp = false;
  EXPECT_EQ(chosen({down, efa("efa_1-rdm")}).domain, "efa_1-rdm");
}

TEST(Provider, BridgesOfContainersAreAvoided) {
  const Offer offer = modernTcp("lo", "127.0.0.1") + modernTcp("docker0", "172.17.0.1") +
                      modernTcp("virbr0", "192.168.122.1") + modernTcp("cni0", "10.244.0.1") +
                      modernTcp("br-5f2e", "172.18.0.1") + modernTcp("ens5", "10.0.0.7");
  EXPECT_EQ(chosen(offer, named("tcp")).interface, "ens5");
  EXPECT_EQ(chosen(modernTcp("docker0", "172.17.0.1"), named("tcp")).interface, "docker0")
      << "when there is no other";
  EXPECT_EQ(chosen(modernTcp("lo", "127.0.0.1"), named("tcp")).interface, "lo");
}

TEST(Provider, RouteToTheMasterDecidesTheInterface) {
  const Offer offer =
      modernTcp("eth0", "10.0.0.7") + modernTcp("eth1", "10.1.0.7") + modernTcp("lo", "127.0.0.1");
  EXPECT_EQ(chosen(offer, named("tcp"), "10.1.0.7").interface, "eth1");
  EXPECT_EQ(chosen(offer, named("tcp"), "127.0.0.1").interface, "lo");
  EXPECT_EQ(chosen(offer, named("tcp"), "").interface, "eth0");
  EXPECT_THAT(choose(offer, named("tcp"), "10.1.0.7").why, HasSubstr("routes to MASTER_ADDR"));
}

TEST(Provider, RouteDecidesTheFamilyOfAddresses) {
  EXPECT_EQ(chosen(debian12(), named("tcp"), "2001:db8::2").address, "2001:db8::2");
}

TEST(Provider, NamedInterfaceIsUsedAndItsAbsenceIsAnError) {
  const Offer offer = modernTcp("eth0", "10.0.0.7") + modernTcp("eth1", "10.1.0.7");
  EXPECT_EQ(chosen(offer, named("tcp", "eth1"), "10.0.0.7").interface, "eth1");
  const std::string text = usageErrorOf([&] { choose(offer, named("tcp", "eth7"), ""); });
  EXPECT_THAT(text, HasSubstr("SMDDP_INTERFACE=eth7"));
  EXPECT_THAT(text, HasSubstr("eth0, eth1"));
}

TEST(Provider, NamedInterfaceDoesNotKeepFromTheCard) {
  const Offer offer = modernTcp("eth0", "10.0.0.7") + Offer{efa("efa_0-rdm"), efa("efa_1-rdm")};
  EXPECT_EQ(chosen(offer, named("", "eth0")).provider, "efa") << "a card has no interface";
  EXPECT_EQ(chosen(offer, named("", "efa_1-rdm")).domain, "efa_1-rdm");
  EXPECT_EQ(chosen(offer, named("tcp", "eth0")).interface, "eth0");
}

TEST(Provider, NamedProviderIsUsed) {
  EXPECT_EQ(chosen(debian12(), named("tcp;ofi_rxm")).provider, "tcp;ofi_rxm");
  EXPECT_EQ(chosen(debian12(), named("shm")).provider, "shm");
  EXPECT_EQ(chosen(debian12(), named("net;ofi_rxm")).provider, "net;ofi_rxm")
      << "unknown to us, known to the user";
}

TEST(Provider, TcpAndNetAreOneProviderUnderTwoNames) {
  EXPECT_EQ(chosen(debian12(), named("tcp")).provider, "net");
  EXPECT_EQ(chosen(modernTcp("eth0", "10.0.0.7"), named("net")).provider, "tcp");
}

TEST(Provider, NamedProviderThatIsMissingIsAnErrorAndNoFallback) {
  const std::string text = usageErrorOf([] { choose(debian12(), named("efa"), ""); });
  EXPECT_THAT(text, HasSubstr("SMDDP_PROVIDER=efa"));
  EXPECT_THAT(
      text,
      HasSubstr("there is net, net;ofi_rxm, shm, tcp;ofi_rxm, udp;ofi_rxd (not used: it loses "
                "messages); and sockets, which needs no libfabric."));
}

TEST(Provider, ShmIsNeverChosenUnasked) {
  const Offer offer = {card("shm", "shm", "shm", FI_MR_VIRT_ADDR)};
  EXPECT_THAT(usageErrorOf([&] { choose(offer, {}, ""); }), HasSubstr("there is shm"));
}

TEST(Provider, UnsuitableProvidersAreRefusedEvenWhenNamed) {
  for (const char* provider : {"sockets", "udp;ofi_rxd"})
    EXPECT_THAT(usageErrorOf([&] { choose(debian12(), named(provider), ""); }),
                HasSubstr("not used"));
}

TEST(Provider, DemandsThatWeDoNotMeetExclude) {
  ProviderInfo raw = efa("efa_0-rdm");
  raw.mrMode |= FI_MR_RAW;
  ProviderInfo prefix = efa("efa_1-rdm");
  prefix.mode = FI_MSG_PREFIX;
  ProviderInfo longKeys = efa("efa_2-rdm");
  longKeys.mrKeyBytes = 16;
  for (const ProviderInfo& info : {raw, prefix, longKeys})
    EXPECT_EQ(chosen({info, efa("efa_9-rdm")}).domain, "efa_9-rdm") << info.domain;
}

TEST(Provider, EmptyOfferSaysWhatToDo) {
  EXPECT_THAT(usageErrorOf([] { choose({}, {}, ""); }), HasSubstr("there is nothing"));
}

TEST(Provider, DescribesPlaceModeAndProtocol) {
  EXPECT_EQ(describe(ip("net", "eth0", "192.0.2.2"), Protocol::Write, "because"),
            "net 117.0, interface eth0 (192.0.2.2), mr_mode none, remote writes; because");
  const std::string text = describe(efa("efa_0-rdm"), Protocol::Send, "because");
  EXPECT_THAT(
      text, HasSubstr("domain efa_0-rdm, mr_mode virt_addr|allocated|prov_key, sends into posted"));
  EXPECT_THAT(text, Not(HasSubstr("interface")));
}

}  // namespace
}  // namespace smddp::transport::fabric
