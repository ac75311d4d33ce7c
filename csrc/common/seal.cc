#include "common/seal.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace smddp {
namespace {

// The last byte of a seal. The signature, if there is one, is in front of it.
constexpr std::byte kPlain{0};
constexpr std::byte kSigned{1};

std::span<const std::byte> bytesOf(std::string_view text) { return std::as_bytes(std::span(text)); }

}  // namespace

Digest Seal::sign(std::string_view purpose, std::span<const std::byte> bytes) const {
  if (token_.empty()) return {};
  // The length comes first, so that no two pairs of purpose and bytes give the same message.
  const uint64_t length = purpose.size();
  const auto head = std::as_bytes(std::span(&length, 1));
  std::vector<std::byte> message(head.begin(), head.end());
  const auto text = bytesOf(purpose);
  message.insert(message.end(), text.begin(), text.end());
  message.insert(message.end(), bytes.begin(), bytes.end());
  return hmacSha256(bytesOf(token_), message);
}

uint64_t Seal::proof(std::string_view purpose, uint64_t sender, uint64_t receiver) const {
  const std::array ids{sender, receiver};
  const Digest digest = sign(purpose, std::as_bytes(std::span(ids)));
  uint64_t proof = 0;
  std::memcpy(&proof, digest.data(), sizeof proof);
  return proof;
}

std::vector<std::byte> Seal::close(std::string_view purpose,
                                   std::span<const std::byte> bytes) const {
  std::vector<std::byte> sealed(bytes.begin(), bytes.end());
  if (!token_.empty()) {
    const Digest signature = sign(purpose, bytes);
    sealed.insert(sealed.end(), signature.begin(), signature.end());
  }
  sealed.push_back(token_.empty() ? kPlain : kSigned);
  return sealed;
}

Seal::Verdict Seal::open(std::string_view purpose, std::vector<std::byte>& sealed) const {
  Digest signature{};
  const bool isSigned = sealed.size() > signature.size() && sealed.back() == kSigned;
  if (!sealed.empty()) sealed.pop_back();
  if (!isSigned) return token_.empty() ? Verdict::Good : Verdict::NoToken;
  const auto begin = sealed.end() - static_cast<std::ptrdiff_t>(signature.size());
  std::copy(begin, sealed.end(), signature.begin());
  sealed.erase(begin, sealed.end());
  if (token_.empty()) return Verdict::Unexpected;
  return sameDigest(signature, sign(purpose, sealed)) ? Verdict::Good : Verdict::OtherToken;
}

}  // namespace smddp
