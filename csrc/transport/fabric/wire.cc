#include "transport/fabric/wire.h"

#include <algorithm>

#include "common/error.h"
#include "transport/wire.h"

namespace smddp::transport::fabric {
namespace {

constexpr uint32_t kAddressVersion = 0x73614101;
constexpr size_t kMaxProviderBytes = 63, kMaxNameBytes = 399;

struct AddressHeader {
  uint32_t version;
  Protocol protocol;
  uint8_t providerBytes;
  uint16_t nameBytes;
  uint64_t id;
};
static_assert(sizeof(AddressHeader) == 16);

}  // namespace

std::vector<std::byte> encode(const Address& address) {
  SMDDP_CHECK(address.provider.size() <= kMaxProviderBytes && address.name.size() <= kMaxNameBytes,
              "address of {} bytes", address.name.size());
  const AddressHeader header{kAddressVersion, address.protocol,
                             static_cast<uint8_t>(address.provider.size()),
                             static_cast<uint16_t>(address.name.size()), address.id};
  const Bytes provider = std::as_bytes(std::span(address.provider));
  std::vector<std::byte> bytes(sizeof(header) + provider.size() + address.name.size());
  std::memcpy(bytes.data(), &header, sizeof(header));
  const auto next = std::copy(provider.begin(), provider.end(), bytes.begin() + sizeof(header));
  std::copy(address.name.begin(), address.name.end(), next);
  return bytes;
}

Address decodeAddress(Bytes bytes) {
  const auto header = readStruct<AddressHeader>(bytes);
  if (!header || header->version != kAddressVersion || header->protocol > Protocol::Send ||
      header->providerBytes > kMaxProviderBytes || header->nameBytes > kMaxNameBytes ||
      bytes.size() != sizeof(*header) + header->providerBytes + header->nameBytes)
    raiseOtherNetwork("libfabric");
  const Bytes provider = bytes.subspan(sizeof(*header), header->providerBytes);
  const Bytes name = bytes.last(header->nameBytes);
  return {header->id,
          header->protocol,
          std::string(reinterpret_cast<const char*>(provider.data()), provider.size()),
          {name.begin(), name.end()}};
}

}  // namespace smddp::transport::fabric
