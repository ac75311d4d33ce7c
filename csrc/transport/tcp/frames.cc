#include "transport/tcp/frames.h"

#include <cstring>

#include "transport/wire.h"

namespace smddp::transport::tcp {
namespace {

// In front of the host's text.
struct AddressHead {
  uint32_t magic = kMagic;
  uint32_t port = 0;
  uint64_t id = 0;
};

}  // namespace

std::span<std::byte> placeIn(std::span<const std::span<std::byte>> regions,
                             const FrameHeader& frame) {
  const RemoteSlot& slot = frame.slot;
  if (slot.target.key < 1 || slot.target.key > regions.size()) return {};
  const std::span<std::byte> region = regions[slot.target.key - 1];
  if (slot.offset > region.size() || frame.length > region.size() - slot.offset) return {};
  return region.subspan(slot.offset, frame.length);
}

std::vector<std::byte> encode(const Address& address) {
  const AddressHead head{kMagic, address.port, address.id};
  std::vector<std::byte> bytes(sizeof head + address.host.size());
  std::memcpy(bytes.data(), &head, sizeof head);
  std::memcpy(bytes.data() + sizeof head, address.host.data(), address.host.size());
  return bytes;
}

Address decodeAddress(Bytes bytes) {
  AddressHead head;
  if (bytes.size() >= sizeof head) std::memcpy(&head, bytes.data(), sizeof head);
  if (bytes.size() <= sizeof head || head.magic != kMagic || head.port > UINT16_MAX) {
    raiseOtherNetwork("TCP sockets");
  }
  const auto* text = reinterpret_cast<const char*>(bytes.data() + sizeof head);
  return {head.id, std::string(text, bytes.size() - sizeof head), static_cast<uint16_t>(head.port)};
}

}  // namespace smddp::transport::tcp
