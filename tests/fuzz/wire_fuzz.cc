// Fuzzes everything that is parsed from a peer: the layouts, and a channel table that receives them as messages.
#include <algorithm>
#include <cstdlib>
#include <exception>
#include <vector>

#include "common/error.h"
#include "transport/channel_table.h"

namespace {

using namespace smddp;
using namespace smddp::transport;

constexpr size_t kPosted = 8;  // bytes of a message that is received where it belongs

// Delivers one buffer as control messages and immediate values. Accepts everything that is sent.
class Input final : public Transport {
 public:
  explicit Input(Bytes bytes) : bytes_(bytes) {}
  std::vector<std::byte> address() const override { return {}; }
  PeerId connect(Bytes, const std::string&) override { return 0; }
  RemoteKey registerMemory(std::span<std::byte>) override { return {}; }
  bool control(PeerId, Bytes) override { return true; }
  bool put(PeerId, const RemoteSlot&, uint32_t, Bytes, Payload, uint64_t) override { return true; }
  // The first byte determines the next event: a control message of that length, a put, or a completion.
  size_t poll(Sink& sink) override {
    if (bytes_.empty()) return 0;
    const auto what = static_cast<uint8_t>(bytes_[0]);
    const Bytes rest = bytes_.subspan(1);
    const size_t length = std::min<size_t>(what < 240 ? what : 8, rest.size());
    uint64_t value = 0;
    for (const std::byte b : rest.first(std::min<size_t>(length, 8))) {
      value = value << 8 | static_cast<uint8_t>(b);
    }
    bytes_ = rest.subspan(length);
    if (what < 240) {
      sink.onControl(0, rest.first(length));
    } else if (what < 248) {
      const auto immediate = static_cast<uint32_t>(value);
      // As TCP: the payload goes where it belongs, if that is known.
      if (what % 2 != 0) std::ranges::fill(sink.placeFor(0, immediate, kPosted), std::byte{1});
      sink.onPut(immediate);
    } else {
      sink.onPutDone(value);
    }
    return 1;
  }
  std::string describe() const override { return "fuzzer"; }

 private:
  Bytes bytes_;
};

struct Nobody final : ControlSink {
  void onControl(PeerId, Bytes message) override {
    if (!parseControlHeader(message)) std::abort();
  }
  void onPeerFailed(PeerId, const std::string&) override {}
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const Bytes input = std::as_bytes(std::span(data, size));
  if (const auto open = parseOpen(input); open && open->window > kMaxWindow) std::abort();
  if (const auto abort = parseAbort(input); abort && abort->text.size() > size) std::abort();
  (void)parseGrant(input);
  (void)parseClose(input);

  Input transport(input);
  Nobody nobody;
  ChannelTable table(transport, nobody);
  constexpr int64_t kWindow = 4, kSlotBytes = 64;
  std::vector<std::byte> memory(kWindow * slotStride(kSlotBytes), std::byte{0x5A});
  ReceiveChannel& in = table.receive({1, 0, 0, 1, 0}, 0, memory, {}, kSlotBytes, kWindow);
  SendChannel& out = table.send({1, 0, 0, 0, 1}, 0);
  const std::vector<std::byte> payload(8);
  std::vector<std::byte> place(kPosted);
  uint64_t posted = 0;
  try {
    while (table.poll() != 0) {
      posted = std::max(posted, in.arrived()) + 1;
      in.post(posted, place);
      (void)out.put(out.sent() + 1, payload, {});
      in.release(in.arrived());
      if (out.flushed() > out.sent() || in.released() > in.arrived()) std::abort();
    }
    in.withdrawPosts();
    table.closeGroup(1);
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::Internal) std::abort();  // a peer must never break our invariants
  }
  return 0;
}
