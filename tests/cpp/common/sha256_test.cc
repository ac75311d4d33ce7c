#include "common/sha256.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace smddp {
namespace {

std::string hex(const Digest& digest) {
  std::string text;
  for (const std::byte b : digest) {
    for (const unsigned half :
         {std::to_integer<unsigned>(b) >> 4, std::to_integer<unsigned>(b) & 15}) {
      text += "0123456789abcdef"[half];
    }
  }
  return text;
}

std::span<const std::byte> bytes(const std::string& text) { return std::as_bytes(std::span(text)); }

std::string sha256(const std::string& text) { return hex(Sha256().add(bytes(text)).finish()); }

// The examples of FIPS 180-4 and of its validation suite.
TEST(Sha256, ReferenceVectors) {
  EXPECT_EQ(sha256(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha256(std::string(1'000'000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// Every position at which the padding may begin, and every way to cut the input.
TEST(Sha256, PiecesMakeNoDifference) {
  std::string text;
  for (int length = 0; length <= 130; ++length) {
    for (size_t cut = 0; cut <= text.size(); ++cut) {
      Sha256 hash;
      hash.add(bytes(text.substr(0, cut))).add(bytes(text.substr(cut)));
      ASSERT_EQ(hex(hash.finish()), sha256(text)) << length << " bytes cut at " << cut;
    }
    text += static_cast<char>('a' + length % 26);
  }
}

// RFC 4231, test cases 1 to 4, 6 and 7.
TEST(HmacSha256, ReferenceVectors) {
  const auto hmac = [](const std::string& key, const std::string& message) {
    return hex(hmacSha256(bytes(key), bytes(message)));
  };
  std::string counting;
  for (int i = 1; i <= 25; ++i) counting += static_cast<char>(i);
  EXPECT_EQ(hmac(std::string(20, '\x0b'), "Hi There"),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hmac("Jefe", "what do ya want for nothing?"),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hmac(std::string(20, '\xaa'), std::string(50, '\xdd')),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  EXPECT_EQ(hmac(counting, std::string(50, '\xcd')),
            "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  EXPECT_EQ(
      hmac(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
      "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_EQ(hmac(std::string(131, '\xaa'),
                 "This is a test using a larger than block-size key and a larger than block-size "
                 "data. The key needs to be hashed before being used by the HMAC algorithm."),
            "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(SameDigest, SeesEveryBit) {
  const Digest digest = Sha256().finish();
  EXPECT_TRUE(sameDigest(digest, digest));
  for (size_t i = 0; i < digest.size() * 8; ++i) {
    Digest other = digest;
    other[i / 8] ^= std::byte(1u << i % 8);
    EXPECT_FALSE(sameDigest(digest, other));
  }
}

}  // namespace
}  // namespace smddp
