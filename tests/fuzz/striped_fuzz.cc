// Fuzzes what several network cards in one transport bring: addresses of peers, announcements of memory, failures.
#include <array>
#include <cstdlib>
#include <memory>
#include <vector>

#include "common/error.h"
#include "hostile_transport.h"
#include "script.h"
#include "transport/striped_transport.h"

namespace {

using namespace smddp;
using namespace smddp::transport;
using smddp::fuzz::HostileTransport;
using smddp::fuzz::Script;

struct Nobody final : Sink {
  void onControl(PeerId, Bytes) override {}
  void onPut(uint32_t) override {}
  void onPutDone(uint64_t) override {}
  void onPeerFailed(PeerId, const std::string& cause) override {
    if (cause.empty()) std::abort();
  }
};

void play(Script& script, StripedTransport& striped,
          const std::array<HostileTransport*, 2>& cards) {
  const uint8_t what = script.byte();
  HostileTransport& card = *cards[what / 8 % 2];
  // Cards report peers that they were introduced to.
  const PeerId from = card.numPeers() > 0 ? what / 16 % card.numPeers() : -1;
  switch (what % 8) {
    case 0: (void)striped.connect(script.piece(), "a peer"); break;
    case 1:
      if (from >= 0) {
        card.deliver(
            [from, message = script.piece()](Sink& sink) { sink.onControl(from, message); });
      }
      break;
    case 2:
      if (from >= 0) card.deliver([from](Sink& sink) { sink.onPeerFailed(from, "it is gone"); });
      break;
    default: {
      const PeerId first = cards[0]->numPeers() > 0 ? what / 16 % cards[0]->numPeers() : -1;
      RemoteSlot slot;
      slot.target.key = script.byte();
      if (first >= 0) (void)striped.put(first, slot, 1, {}, {}, 1);
    }
  }
  Nobody sink;
  (void)striped.poll(sink);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Script script(data, size);
  std::array<HostileTransport*, 2> cards;
  std::vector<std::unique_ptr<Transport>> owned;
  for (HostileTransport*& card : cards) {
    owned.push_back(std::make_unique<HostileTransport>());
    card = static_cast<HostileTransport*>(owned.back().get());
  }
  StripedTransport striped(std::move(owned));
  while (!script.done()) {
    try {
      play(script, striped, cards);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::Internal) std::abort();
    }
  }
  return 0;
}
