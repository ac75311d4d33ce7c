#include "reduction/encoded.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "common/error.h"
#include "reduction/guarded_buffer.h"
#include "reduction/kernel_table.h"
#include "reduction/odd_float_mode.h"
#include "reduction/oracle.h"
#include "reduction/reduce_one.h"
#include "support/effort.h"

namespace smddp::reduction {
namespace {

using Numbers = std::vector<float>;

constexpr Wire kWires[] = {Wire::fp32, Wire::bf16, Wire::int8};
constexpr float kInf = INFINITY;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kDenormal = std::numeric_limits<float>::denorm_min();
constexpr float kSmallest = 0x1p-100f;  // the smallest magnitude that int8 sends
// A finite number is at most so many scales off.
constexpr double kBound = 0.5 + 0x1p-15;

template <typename T>
T load(const Bytes& bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}
template <typename T>
void store(Bytes& bytes, size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
}

Bytes bytesOf(const Numbers& numbers) {
  Bytes bytes(numbers.size() * sizeof(float));
  for (size_t i = 0; i < numbers.size(); ++i) store(bytes, i * sizeof(float), numbers[i]);
  return bytes;
}
Numbers numbersOf(const Bytes& bytes) {
  Numbers numbers;
  for (size_t at = 0; at < bytes.size(); at += sizeof(float))
    numbers.push_back(load<float>(bytes, at));
  return numbers;
}

// The oracle: the formats as encoded.h describes them, one number at a time.
namespace expected {

constexpr size_t kScaleBytes = 4;
constexpr size_t kBlock = 256;

Bytes encodeInt8(const Numbers& numbers) {
  Bytes bytes;
  for (size_t first = 0; first < numbers.size(); first += kBlock) {
    const size_t end = std::min(first + kBlock, numbers.size());
    float largest = 0;
    bool special = false;
    for (size_t i = first; i < end; ++i)
      if (std::isfinite(numbers[i]))
        largest = std::max(largest, std::fabs(numbers[i]));
      else
        special = true;
    largest = std::min(largest, static_cast<float>(FLT_MAX * (1 - 0x1p-20)));
    const float codes = special ? 126 : 127;
    const bool zeros = largest < kSmallest;
    const float scale = zeros ? 0 : largest / codes, factor = zeros ? 0 : codes / largest;
    const size_t at = bytes.size();
    bytes.resize(at + kScaleBytes + end - first);
    store(bytes, at, special ? -scale : scale);
    for (size_t i = first; i < end; ++i) {
      const float x = numbers[i];
      int code;
      if (std::isnan(x))
        code = -128;
      else if (std::isinf(x))
        code = x > 0 ? 127 : -127;
      else
        code = static_cast<int>(std::nearbyint(static_cast<double>(x * factor)));
      store(bytes, at + kScaleBytes + i - first, static_cast<int8_t>(code));
    }
  }
  return bytes;
}

float decodeInt8(float scale, int8_t code) {
  if (std::signbit(scale)) {
    if (code == 127) return kInf;
    if (code == -127) return -kInf;
    if (code == -128) return kNaN;
  }
  return std::isfinite(scale) ? code * std::fabs(scale) : kNaN;
}

Bytes encode(Wire wire, const Numbers& numbers) {
  if (wire == Wire::fp32) return bytesOf(numbers);
  if (wire == Wire::int8) return encodeInt8(numbers);
  Bytes bytes(2 * numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i)
    store(bytes, 2 * i, oracle::Bfloat16::encode(numbers[i]));
  return bytes;
}

Numbers decode(Wire wire, const Bytes& bytes, size_t count) {
  if (wire == Wire::fp32) return numbersOf(bytes);
  Numbers numbers;
  for (size_t i = 0; i < count; ++i)
    if (wire == Wire::bf16) {
      // A NaN that is only copied keeps its bits.
      numbers.push_back(std::bit_cast<float>(load<uint16_t>(bytes, 2 * i) * 0x10000u));
    } else {
      const size_t block = i / kBlock * (kScaleBytes + kBlock);
      numbers.push_back(decodeInt8(load<float>(bytes, block),
                                   load<int8_t>(bytes, block + kScaleBytes + i % kBlock)));
    }
  return numbers;
}

}  // namespace expected

// A call with its data, and what must come out.
struct Vector {
  Bytes bytes;
  bool isEncoded;
};
struct Problem {
  Wire wire;
  size_t count;
  ReduceOp op = ReduceOp::SUM;
  Scale scale = {};
  std::vector<Vector> srcs = {};
  std::vector<bool> dstsEncoded = {};
  bool hasResidual = false;
  Numbers residual = {};
};
struct Result {
  Bytes plain, encoded;
  Numbers residual;
};

Result resultOf(const Problem& problem) {
  const bool encodes = std::ranges::count(problem.dstsEncoded, true) > 0;
  const bool computes = problem.srcs.size() > 1 || problem.scale.post || problem.hasResidual;
  Numbers x;
  for (const Vector& src : problem.srcs) {
    const Numbers numbers = src.isEncoded ? expected::decode(problem.wire, src.bytes, problem.count)
                                          : numbersOf(src.bytes);
    if (x.empty())
      x = numbers;
    else
      for (size_t i = 0; i < problem.count; ++i) x[i] += numbers[i];
  }
  for (size_t i = 0; i < problem.count; ++i) {
    if (problem.scale.post) x[i] /= static_cast<float>(problem.scale.divisor);
    if (problem.hasResidual) x[i] += problem.residual[i];
    if (computes && std::isnan(x[i])) x[i] = kNaN;
  }
  Result result;
  if (!encodes) {
    result.plain = bytesOf(x);
    return result;
  }
  const bool copies = !computes && problem.srcs[0].isEncoded;
  result.encoded = copies ? problem.srcs[0].bytes : expected::encode(problem.wire, x);
  const Numbers decoded = expected::decode(problem.wire, result.encoded, problem.count);
  result.plain = bytesOf(decoded);
  if (problem.hasResidual)
    for (size_t i = 0; i < problem.count; ++i) {
      const float lost = x[i] - decoded[i];
      result.residual.push_back(std::isfinite(lost) ? lost : 0);
    }
  return result;
}

// Returns an empty text if all is right; otherwise the first mistake. `layout` decides where buffers begin and which
// destinations are sources.
std::string check(const Problem& problem, const KernelTable& kernels, uint64_t layout) {
  std::mt19937_64 random(layout);
  const Result result = resultOf(problem);
  std::vector<GuardedBuffer> buffers;
  const auto add = [&](const Bytes& content) {
    GuardedBuffer& buffer = buffers.emplace_back(content.size(), random() % 64);
    if (!content.empty()) std::memcpy(buffer.data(), content.data(), content.size());
    return buffers.size() - 1;
  };
  std::vector<Source> srcs;
  std::vector<Destination> dsts;
  std::vector<size_t> bufferOfDst;
  for (const Vector& src : problem.srcs) add(src.bytes);
  std::vector<bool> changes(problem.srcs.size(), false);
  for (const bool isEncoded : problem.dstsEncoded) {
    const size_t s = random() % problem.srcs.size();
    if (random() % 2 == 0 && !changes[s] && problem.srcs[s].isEncoded == isEncoded) {
      changes[s] = true;
      bufferOfDst.push_back(s);
    } else {
      const size_t bytes =
          isEncoded ? encodedBytes(problem.wire, problem.count) : problem.count * sizeof(float);
      bufferOfDst.push_back(add(Bytes(bytes)));
    }
  }
  const size_t residual = add(bytesOf(problem.residual));
  // Now the buffers stay where they are.
  for (size_t s = 0; s < problem.srcs.size(); ++s)
    srcs.push_back({buffers[s].data(), problem.srcs[s].isEncoded});
  for (size_t d = 0; d < bufferOfDst.size(); ++d)
    dsts.push_back({buffers[bufferOfDst[d]].data(), problem.dstsEncoded[d]});

  reduceEncodedWith(
      kernels, problem.wire, dsts, srcs, problem.count, problem.op, problem.scale,
      problem.hasResidual ? reinterpret_cast<float*>(buffers[residual].data()) : nullptr);

  for (size_t d = 0; d < dsts.size(); ++d) {
    const Bytes& right = dsts[d].isEncoded ? result.encoded : result.plain;
    const Bytes content = buffers[bufferOfDst[d]].content();
    const auto mistake = std::ranges::mismatch(content, right);
    if (mistake.in1 != content.end() || mistake.in2 != right.end())
      return fmt::format("destination {}, encoded {}, byte {}", d, dsts[d].isEncoded,
                         mistake.in1 - content.begin());
  }
  for (size_t s = 0; s < srcs.size(); ++s)
    if (!changes[s] && buffers[s].content() != problem.srcs[s].bytes)
      return fmt::format("source {} was changed", s);
  if (problem.hasResidual && buffers[residual].content() != bytesOf(result.residual))
    return "residual";
  for (const GuardedBuffer& buffer : buffers)
    if (!buffer.marginsIntact()) return "wrote outside";
  return "";
}

std::string checkLevels(const Problem& problem, uint64_t layout) {
  for (SimdLevel level : availableLevels()) {
    const std::string mistake = check(problem, *kernelsOf(level), layout);
    if (!mistake.empty()) return fmt::format("{}: {}", toString(level), mistake);
  }
  return "";
}

// Numbers of one kind: those of a gradient, of all magnitudes, half-way between two codes, special, or any bits.
Numbers randomNumbers(std::mt19937_64& random, size_t count) {
  std::normal_distribution<float> normal;
  const uint64_t kind = random() % 8;
  const int exponent = static_cast<int>(random() % 277) - 149;
  const float edges[] = {0.0f,       -0.0f,       FLT_MAX,       -FLT_MAX,    kDenormal,
                         FLT_MIN,    kSmallest,   -kSmallest,    0x1p-101f,   0x1.fffffep-101f,
                         0x1p-149f,  0x1p127f,    1.0f,          -1.0f,       0x1.fffffp127f,
                         -0x1p-107f, 0x1.fep127f, 0x1.fffep127f, 0x1.ff8p127f};
  const float specials[] = {kInf, -kInf, kNaN, std::bit_cast<float>(0xff812345u)};
  Numbers numbers(count);
  for (float& x : numbers) {
    const float someInteger = static_cast<float>(static_cast<int>(random() % 255) - 127);
    switch (kind) {
      case 0: x = std::ldexp(normal(random), exponent); break;
      case 1: x = std::ldexp(normal(random), static_cast<int>(random() % 277) - 149); break;
      case 2:
        x = std::ldexp(someInteger + (std::fabs(someInteger) < 127 ? 0.5f : 0), exponent % 100);
        break;
      case 3: x = edges[random() % std::size(edges)]; break;
      case 4: x = std::bit_cast<float>(static_cast<uint32_t>(random())); break;
      case 5: x = std::ldexp(normal(random), -101); break;
      case 6: x = normal(random); break;
      default: x = 0;
    }
    if (kind >= 5 && random() % 100 == 0) x = specials[random() % std::size(specials)];
  }
  return numbers;
}

// Encoded by the oracle, or bytes that no encoder writes.
Bytes randomEncoded(std::mt19937_64& random, Wire wire, size_t count) {
  if (random() % 4 > 0) return expected::encode(wire, randomNumbers(random, count));
  Bytes bytes(encodedBytes(wire, count));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

Problem randomProblem(std::mt19937_64& random, Wire wire, size_t count) {
  Problem problem{.wire = wire, .count = count};
  const size_t numSrcs = random() % 2 == 0 ? 1 : 1 + random() % 5;
  for (size_t s = 0; s < numSrcs; ++s) {
    const bool isEncoded = random() % 2 == 0;
    problem.srcs.push_back(
        {isEncoded ? randomEncoded(random, wire, count) : bytesOf(randomNumbers(random, count)),
         isEncoded});
  }
  const size_t numDsts = 1 + random() % 3;
  for (size_t d = 0; d < numDsts; ++d) problem.dstsEncoded.push_back(random() % 2 == 0);
  if (random() % 3 == 0) {
    problem.op = ReduceOp::AVG;
    problem.scale = {.post = random() % 4 > 0, .divisor = static_cast<double>(1 + random() % 9)};
  }
  if (std::ranges::count(problem.dstsEncoded, true) > 0 && random() % 3 == 0) {
    problem.hasResidual = true;
    problem.residual = randomNumbers(random, count);
  }
  return problem;
}

class EncodedTest : public testing::TestWithParam<Wire> {
 protected:
  static void checkRandom(size_t count, uint64_t seed) {
    std::mt19937_64 random(seed);
    const Problem problem = randomProblem(random, GetParam(), count);
    ASSERT_EQ(checkLevels(problem, seed), "")
        << "count " << count << ", seed " << seed << ", " << problem.srcs.size() << " sources, "
        << toString(problem.op) << ", residual " << problem.hasResidual;
  }
};

TEST_P(EncodedTest, MatchesTheOracleAtEveryShortLength) {
  const test::Share share = test::shareUnderSanitizers();
  for (size_t count = 0; count <= 1025; ++count)
    for (uint64_t variant = 0; variant < 4; ++variant)
      if (const uint64_t seed = 4 * count + variant; share.has(seed)) checkRandom(count, seed);
}

TEST_P(EncodedTest, MatchesTheOracleInManyVariants) {
  const test::Share share = test::shareUnderSanitizers();
  for (uint64_t seed = 10'000; seed < 14'000; ++seed)
    if (share.has(seed)) checkRandom(256 + seed % 3, seed);
}

TEST_P(EncodedTest, MatchesTheOracleOnLongVectors) {
  for (uint64_t seed = 20'000; seed < 20'010; ++seed) checkRandom(30'011, seed);
}

INSTANTIATE_TEST_SUITE_P(All, EncodedTest, testing::ValuesIn(kWires),
                         [](const auto& info) { return std::string(toString(info.param)); });

// Calls with plain vectors, on the level of this machine.
Bytes encode(Wire wire, const Numbers& numbers, float* residual = nullptr) {
  Bytes bytes(encodedBytes(wire, numbers.size()));
  const Source src{numbers.data(), false};
  const Destination dst{bytes.data(), true};
  reduceEncoded(wire, {&dst, 1}, {&src, 1}, numbers.size(), ReduceOp::SUM, {}, residual);
  return bytes;
}
Numbers decode(Wire wire, const Bytes& bytes, size_t count) {
  Numbers numbers(count);
  const Source src{bytes.data(), true};
  const Destination dst{numbers.data(), false};
  reduceEncoded(wire, {&dst, 1}, {&src, 1}, count, ReduceOp::SUM);
  return numbers;
}
Numbers roundTrip(Wire wire, const Numbers& numbers) {
  return decode(wire, encode(wire, numbers), numbers.size());
}
Bytes hex(std::initializer_list<int> values) {
  Bytes bytes;
  for (int value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

TEST(EncodedBytes, CountsScales) {
  EXPECT_EQ(encodedBytes(Wire::fp32, 1000), 4000u);
  EXPECT_EQ(encodedBytes(Wire::bf16, 1000), 2000u);
  EXPECT_EQ(encodedBytes(Wire::int8, 0), 0u);
  EXPECT_EQ(encodedBytes(Wire::int8, 1), 5u);
  EXPECT_EQ(encodedBytes(Wire::int8, 256), 260u);
  EXPECT_EQ(encodedBytes(Wire::int8, 257), 265u);
}

TEST(Int8, EncodesTheExampleOfTheHeader) {
  EXPECT_EQ(encode(Wire::int8, {1.0f, -0.5f, 0.3f, 0.0f}),
            hex({0x04, 0x02, 0x01, 0x3c, 0x7f, 0xc0, 0x26, 0x00}));
  const Numbers decoded = roundTrip(Wire::int8, {1.0f, -0.5f, 0.3f, 0.0f});
  EXPECT_EQ(decoded[0], 1.0f);
  EXPECT_NEAR(decoded[1], -0.50394, 5e-6);
  EXPECT_NEAR(decoded[2], 0.29921, 5e-6);
  EXPECT_EQ(decoded[3], 0.0f);
}

TEST(Int8, CarriesWhatIsNotFinite) {
  EXPECT_EQ(encode(Wire::int8, {252.0f, kInf, -kInf, kNaN, -252.0f, -0.0f}),
            hex({0x00, 0x00, 0x00, 0xc0, 126, 127, 0x81, 0x80, 0x82, 0}));  // -2.0f
  EXPECT_EQ(encode(Wire::int8, {0x1p-101f, kInf, -kDenormal}),
            hex({0x00, 0x00, 0x00, 0x80, 0, 127, 0}));
  const Numbers decoded = roundTrip(Wire::int8, {0x1p-101f, kInf, -kInf, kNaN});
  EXPECT_EQ(decoded[0], 0.0f);
  EXPECT_EQ(decoded[1], kInf);
  EXPECT_EQ(decoded[2], -kInf);
  EXPECT_EQ(std::bit_cast<uint32_t>(decoded[3]), 0x7fc00000u);
}

TEST(Int8, SendsVerySmallNumbersAsZeros) {
  EXPECT_EQ(encode(Wire::int8, {0x1.fffffep-101f, -kDenormal, -0.0f}), hex({0, 0, 0, 0, 0, 0, 0}));
  EXPECT_NE(encode(Wire::int8, {kSmallest})[4], std::byte{0});
}

TEST(Int8, KeepsLargeNumbersFinite) {
  for (float special : {0.0f, kInf})
    for (float x : roundTrip(Wire::int8, {FLT_MAX, -FLT_MAX, FLT_MAX / 2, special}))
      if (x != special) {
        EXPECT_TRUE(std::isfinite(x));
        EXPECT_GE(std::fabs(x), FLT_MAX / 2.02f);
      }
}

TEST(Int8, IsWithinTheBound) {
  std::mt19937_64 random(1);
  const test::Share share = test::shareUnderSanitizers();
  for (uint64_t turn = 0; turn < 20'000; ++turn) {
    const int exponent = static_cast<int>(random() % 220) - 99;
    const float m = std::ldexp(1 + std::generate_canonical<float, 24>(random), exponent);
    Numbers numbers{m};
    // Next to the middle of two codes the error is largest.
    for (int code = -126; code < 127; ++code) {
      const auto steps = static_cast<int>(random() % 9) - 4;
      float x = static_cast<float>((code + 0.5) * m / (turn % 2 == 0 ? 127 : 126));
      for (int step = 0; step < std::abs(steps); ++step)
        x = std::nextafter(x, steps > 0 ? kInf : -kInf);
      numbers.push_back(std::min(std::max(x, -m), m));
    }
    if (turn % 2 == 1) numbers.push_back(kInf);
    if (!share.has(turn)) continue;
    const Bytes bytes = encode(Wire::int8, numbers);
    const Numbers decoded = decode(Wire::int8, bytes, numbers.size());
    const double scale = std::fabs(load<float>(bytes, 0));
    for (size_t i = 0; i < numbers.size(); ++i)
      if (std::isfinite(numbers[i])) {
        const double error = std::fabs(static_cast<double>(numbers[i]) - decoded[i]);
        ASSERT_LE(error, kBound * scale) << numbers[i] << " of " << m << ", turn " << turn;
      }
  }
}

// Another host may send any bytes.
TEST(Int8, DecodesAnyBytes) {
  for (uint32_t scale : {0x00000000u, 0x80000000u, 0x7f800000u, 0xff800000u, 0x7fc00000u,
                         0xffc00000u, 0x7f800001u, 0xffbfffffu, 0x00000001u, 0x80000001u,
                         0x7f7fffffu, 0xff7fffffu, 0x3f800000u, 0xbf800000u}) {
    Problem problem{.wire = Wire::int8, .count = 256};
    Bytes bytes(260);
    store(bytes, 0, scale);
    for (int code = 0; code < 256; ++code) bytes[4 + code] = static_cast<std::byte>(code);
    problem.srcs = {{bytes, true}};
    problem.dstsEncoded = {false, true};
    EXPECT_EQ(checkLevels(problem, 0), "") << "copied, scale " << scale;
    problem.srcs.push_back({bytesOf(Numbers(256, 1.0f)), false});
    EXPECT_EQ(checkLevels(problem, 0), "") << "added, scale " << scale;
    // A block that is not whole: zeros that fill it up must not change it.
    problem.count = 200;
    problem.srcs[0].bytes.resize(204);
    problem.srcs[1].bytes.resize(800);
    EXPECT_EQ(checkLevels(problem, 0), "") << "short, scale " << scale;
  }
}

TEST(Bf16, RoundsToNearestEven) {
  const Numbers numbers{1.0f + 0x1p-8f,
                        1.0f + 0x3p-8f,
                        -0.0f,
                        FLT_MAX,
                        -kInf,
                        kDenormal,
                        std::bit_cast<float>(0xff800001u)};
  EXPECT_EQ(encode(Wire::bf16, numbers), hex({0x80, 0x3f, 0x82, 0x3f, 0x00, 0x80, 0x80, 0x7f, 0x80,
                                              0xff, 0x00, 0x00, 0xc0, 0x7f}));
}

TEST(Fp32, EqualsReduce) {
  std::mt19937_64 random(7);
  const size_t count = 1000;
  for (size_t numSrcs : {1, 2, 5}) {
    std::vector<Numbers> numbers;
    std::vector<const void*> srcs;
    std::vector<Source> sources;
    for (size_t s = 0; s < numSrcs; ++s) numbers.push_back(randomNumbers(random, count));
    for (size_t s = 0; s < numSrcs; ++s) {
      srcs.push_back(numbers[s].data());
      sources.push_back({numbers[s].data(), s % 2 == 0});
    }
    for (const Scale& scale : {Scale{}, Scale{.post = true, .divisor = 3}}) {
      Numbers expected(count), encoded(count), plain(count);
      void* dst = expected.data();
      reduce({&dst, 1}, srcs, count, DataType::float32, ReduceOp::AVG, scale);
      const Destination dsts[] = {{encoded.data(), true}, {plain.data(), false}};
      reduceEncoded(Wire::fp32, dsts, sources, count, ReduceOp::AVG, scale);
      EXPECT_EQ(bytesOf(encoded), bytesOf(expected));
      EXPECT_EQ(bytesOf(plain), bytesOf(expected));
    }
  }
}

TEST(Encoded, AveragesInFloat32AndEncodesOnce) {
  const Numbers a{127.0f, -2.0f}, b{127.0f, 1.0f};
  const Bytes encoded = encode(Wire::int8, a);  // scale 1
  const Source srcs[] = {{encoded.data(), true}, {b.data(), false}};
  Bytes bytes(encodedBytes(Wire::int8, 2));
  Numbers plain(2);
  const Destination dsts[] = {{plain.data(), false}, {bytes.data(), true}};
  reduceEncoded(Wire::int8, dsts, srcs, 2, ReduceOp::AVG, {.post = true, .divisor = 2});
  // The averages are 127 and -0.5.
  EXPECT_EQ(plain, (Numbers{127.0f, 0.0f}));
  EXPECT_EQ(bytes, hex({0x00, 0x00, 0x80, 0x3f, 127, 0}));
  reduceEncoded(Wire::int8, dsts, srcs, 2, ReduceOp::AVG);
  EXPECT_EQ(plain, (Numbers{254.0f, 0.0f}));
}

TEST(Residual, IsWhatEncodingLost) {
  for (Wire wire : kWires) {
    std::mt19937_64 random(11);
    std::normal_distribution<float> normal;
    Numbers x(10'000), before(x.size());
    for (size_t i = 0; i < x.size(); ++i) x[i] = normal(random), before[i] = normal(random) / 256;
    Numbers after = before;
    const Bytes bytes = encode(wire, x, after.data());
    const Numbers decoded = decode(wire, bytes, x.size());
    size_t different = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double exact = x[i] + before[i];  // rounded to float32
      const double error = exact - (static_cast<double>(decoded[i]) + after[i]);
      ASSERT_LE(std::fabs(error), 0x1p-24 * std::fabs(after[i])) << toString(wire) << " " << i;
      if (error != 0) ++different;
    }
    EXPECT_LE(different, x.size() / 100) << toString(wire);
    if (wire == Wire::fp32) {
      EXPECT_EQ(after, Numbers(x.size(), 0.0f));
    }
  }
}

// What one message loses, the next ones carry: the sum of many messages is right within a step.
TEST(Residual, KeepsErrorsFromAddingUp) {
  constexpr int kMessages = 100;
  for (Wire wire : {Wire::bf16, Wire::int8}) {
    std::mt19937_64 random(12);
    std::normal_distribution<float> normal;
    Numbers x(1000), residual(x.size());
    for (float& value : x) value = normal(random);
    std::vector<double> total(x.size());
    for (int message = 0; message < kMessages; ++message) {
      const Numbers decoded = decode(wire, encode(wire, x, residual.data()), x.size());
      for (size_t i = 0; i < x.size(); ++i) total[i] += decoded[i];
    }
    for (size_t i = 0; i < x.size(); ++i)
      ASSERT_NEAR(total[i] + residual[i], static_cast<double>(kMessages) * x[i], 1e-4)
          << toString(wire) << " " << i;
  }
}

TEST(Residual, IsZeroWhereItWouldNotBeFinite) {
  Numbers residual{0, 0, 0, kNaN, 0, 1};
  encode(Wire::bf16, {kInf, kNaN, FLT_MAX, 1, 1, 1}, residual.data());
  EXPECT_EQ(residual, Numbers(6, 0.0f));
}

TEST(Encoded, RefusesWhatHasNoMeaningBeforeWriting) {
  const Numbers a{1}, b{2};
  Numbers out{-1}, residual{-1};
  const Source srcs[] = {{a.data(), false}, {b.data(), false}};
  const Destination dsts[] = {{out.data(), false}};
  const auto call = [&](ReduceOp op, std::span<const Source> sources, const Scale& scale,
                        float* lost) {
    reduceEncoded(Wire::bf16, dsts, sources, 1, op, scale, lost);
  };
  EXPECT_THROW(call(ReduceOp::MAX, srcs, {}, nullptr), Error);
  EXPECT_THROW(call(ReduceOp::PREMUL_SUM, srcs, {.pre = true}, nullptr), Error);
  EXPECT_THROW(call(ReduceOp::SUM, {}, {}, nullptr), Error);
  EXPECT_THROW(call(ReduceOp::SUM, srcs, {.post = true}, nullptr), Error);
  EXPECT_THROW(call(ReduceOp::AVG, srcs, {.divisor = 0}, nullptr), Error);
  EXPECT_THROW(call(ReduceOp::SUM, srcs, {}, residual.data()), Error);
  EXPECT_EQ(out[0], -1);
  EXPECT_EQ(residual[0], -1);
  reduceEncoded(Wire::bf16, {}, srcs, 1, ReduceOp::SUM);
}

TEST(Encoded, DoesNotDependOnTheFloatMode) {
#if defined(__x86_64__)
  std::mt19937_64 random(13);
  std::vector<Problem> problems;
  for (int i = 0; i < 200; ++i)
    for (Wire wire : kWires) problems.push_back(randomProblem(random, wire, 300));
  const auto encodeAll = [&] {
    std::vector<Bytes> all;
    for (const Problem& problem : problems) {
      std::vector<Source> srcs;
      for (const Vector& src : problem.srcs) srcs.push_back({src.bytes.data(), src.isEncoded});
      Bytes encoded(encodedBytes(problem.wire, problem.count)), plain(problem.count * 4);
      const Destination dsts[] = {{encoded.data(), true}, {plain.data(), false}};
      reduceEncoded(problem.wire, dsts, srcs, problem.count, problem.op, problem.scale);
      all.push_back(encoded);
      all.push_back(plain);
    }
    return all;
  };
  const std::vector<Bytes> usual = encodeAll();
  std::vector<Bytes> all;
  inOddFloatMode([&] { all = encodeAll(); });
  EXPECT_EQ(all, usual);
#else
  GTEST_SKIP() << "sets the control register of x86-64";
#endif
}

}  // namespace
}  // namespace smddp::reduction
