// Fuzzes messages between two ranks: the other end may send anything at any time.
#include <cstdlib>
#include <memory>
#include <vector>

#include "common/error.h"
#include "common/ownership.h"
#include "engine/calls/call.h"
#include "engine/operations/matcher.h"
#include "hostile_transport.h"
#include "script.h"
#include "transport/channel_table.h"

namespace {

using namespace smddp;
using namespace smddp::engine;
using smddp::fuzz::Script;
using transport::Bytes;

constexpr uint64_t kGroup = 1;
constexpr int64_t kMessageBytes = 64, kWindow = 4;

class Peer final : public operations::Matcher::Host, public transport::ControlSink {
 public:
  Peer() { (void)ownership.tryAcquire(); }
  void sendControl(Rank, Bytes) override {}
  transport::SendChannel& sendChannel(Rank) override { return table.send({kGroup, 0, 0, 0, 1}, 0); }
  transport::ReceiveChannel& receiveChannel(Rank) override {
    return table.receive({kGroup, 0, 0, 1, 0}, 0, window, {}, kMessageBytes, kWindow);
  }
  void onComplete(operations::Transfer& transfer) override {
    if (transfer.moved > transfer.bytes) std::abort();
    (void)transfer.completion->complete(std::nullopt);
  }
  bool backlogged(Rank) override { return full; }
  void onControl(transport::PeerId, Bytes message) override { (void)matcher.onControl(1, message); }
  void onPeerFailed(transport::PeerId, const std::string&) override {}

  Ownership ownership;
  bool full = false;  // the transport has no room
  fuzz::HostileTransport wire;
  transport::ChannelTable table{wire, *this};
  std::vector<std::byte> window =
      std::vector<std::byte>(kWindow * transport::slotStride(kMessageBytes));
  operations::Matcher matcher{ownership, *this, kGroup, 0};
};

void play(Script& script, Peer& peer, std::vector<std::vector<std::byte>>& buffers) {
  const uint8_t what = script.byte();
  // The call that a rank claims to be in.
  if (what == 255) (void)calls::describe(script.number<transport::CallFingerprint>());
  switch (what % 8) {
    case 0:
    case 1: {
      buffers.emplace_back(script.byte());
      operations::Transfer transfer;
      transfer.message.send = what % 8 == 0;
      transfer.message.buffered = what >= 128;
      transfer.message.peer = what % 8 == 1 && what >= 128 ? calls::kAnySource : 1;
      transfer.message.tag = what / 8 % 4;
      transfer.message.buffer = {buffers.back()};
      transfer.completion = std::make_shared<calls::Completion>();
      const auto completion = transfer.completion;
      peer.matcher.submit(std::move(transfer));
      if (what >= 192) (void)peer.matcher.withdraw(*completion);
      break;
    }
    case 2:
      peer.full = what >= 128;
      peer.wire.setFull(what >= 192);
      peer.matcher.advance();
      break;
    case 3: {
      // Write directly to the memory that was granted.
      const auto bytes = script.piece();
      const size_t at = script.number<uint16_t>() % peer.window.size();
      std::copy_n(bytes.begin(), std::min(bytes.size(), peer.window.size() - at),
                  peer.window.begin() + static_cast<std::ptrdiff_t>(at));
      break;
    }
    case 4:
      peer.wire.deliver([value = script.number<uint32_t>()](auto& sink) { sink.onPut(value); });
      break;
    case 5:
      peer.wire.deliver([value = script.number<uint64_t>()](auto& sink) { sink.onPutDone(value); });
      break;
    default:
      peer.wire.deliver([message = script.piece()](auto& sink) { sink.onControl(0, message); });
  }
  (void)peer.table.poll();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Script script(data, size);
  std::vector<std::vector<std::byte>> buffers;
  // Waiting messages refer to the buffers, so these must not move.
  buffers.reserve(size + 1);
  Peer peer;
  try {
    while (!script.done()) play(script, peer, buffers);
    // What is left in flight is intact.
    peer.matcher.forEach([](const engine::operations::Transfer& transfer) {
      if (transfer.moved > transfer.bytes) std::abort();
    });
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::Internal) std::abort();
  }
  return 0;
}
