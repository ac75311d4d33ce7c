// Fuzzes what comes from the fabric before the channels see it: addresses, the order of messages, fragments of puts.
#include <cstdlib>
#include <vector>

#include "common/error.h"
#include "script.h"
#include "transport/fabric/early_messages.h"
#include "transport/fabric/reassembly.h"

namespace {

using namespace smddp;
using namespace smddp::transport;
using namespace smddp::transport::fabric;
using smddp::fuzz::Script;

struct Nobody final : Sink {
  void onControl(PeerId from, Bytes) override {
    if (from < 0) std::abort();
  }
  void onPut(uint32_t) override {}
  void onPutDone(uint64_t) override {}
  void onPeerFailed(PeerId, const std::string&) override {}
};

void addresses(Script& script) {
  const auto bytes = script.rest();
  const Address address = decodeAddress(bytes);
  const auto again = encode(address);
  if (!std::equal(again.begin(), again.end(), bytes.begin(), bytes.end())) std::abort();
}

void order(Script& script) {
  EarlyMessages early;
  Nobody sink;
  PeerId peers = 0;
  while (!script.done()) {
    const uint8_t what = script.byte();
    const uint64_t sender = what / 8 % 4;
    switch (what % 4) {
      case 0:
        // Each sender is introduced once.
        if (peers <= 3) early.introduce(static_cast<uint64_t>(peers), peers), ++peers;
        break;
      case 1: early.deliverIntroduced(sink); break;
      case 2: early.arrived(script.number<uint64_t>(), script.byte(), script.piece(), sink); break;
      default: early.arrived(sender, script.byte(), script.piece(), sink);
    }
  }
  (void)early.takeOverflowed();
}

void puts(Script& script) {
  fid_domain unused{};
  Registry registry{unused, nullptr, /*mrMode=*/0, /*remote=*/false};
  // The sanitizer guards it on both sides.
  std::vector<std::byte> memory(100);
  const RemoteKey key = registry.add(memory);
  Reassembly reassembly(registry);
  while (!script.done()) {
    auto fragment = script.number<FragmentHeader>();
    if (script.byte() % 4 != 0) fragment.slot.target = key;
    if (script.byte() % 4 != 0) fragment.totalBytes %= 128;
    const auto bytes = script.piece();
    try {
      (void)reassembly.accept(fragment, bytes);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::Transport) throw;
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Script script(data, size);
  try {
    switch (script.byte() % 3) {
      case 0: addresses(script); break;
      case 1: order(script); break;
      default: puts(script);
    }
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::Internal) std::abort();
  }
  return 0;
}
