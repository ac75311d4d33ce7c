#include "bootstrap/introduction.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <random>

#include "bootstrap/node_name.h"
#include "common/error.h"

namespace smddp::bootstrap {
namespace {

using testing::HasSubstr;

std::vector<std::byte> bytes(size_t count, int seed) {
  std::vector<std::byte> result(count);
  for (size_t i = 0; i < count; ++i) result[i] = static_cast<std::byte>(seed + 7 * i);
  return result;
}

Introduction example() {
  Introduction result = introduceThisProcess(Settings(), randomProcessId());
  result.nodeAgreement = 0x1122334455667788;
  result.slab = bytes(100, 1);
  result.fabric = bytes(512, 2);
  result.lifeline = bytes(23, 3);
  return result;
}

// The introductions of ranks 0, 1, … of the job.
std::vector<Introduction> numbered(std::vector<Introduction> introductions) {
  for (size_t i = 0; i < introductions.size(); ++i) introductions[i].jobRank = static_cast<Rank>(i);
  return introductions;
}

// Returns the text of the error that `call` throws; the error must have this kind.
template <typename Call>
std::string errorOf(ErrorKind kind, const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(toString(error.kind()), std::string(toString(kind))) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

TEST(Introduction, SurvivesTheStore) {
  Introduction before = example();
  before.groupSize = 12;
  const Introduction after = parseIntroduction(serialise(before), 3);
  EXPECT_EQ(after.groupSize, 12);
  EXPECT_EQ(after.jobRank, 3);
  EXPECT_EQ(after.libraryVersion, SMDDP_VERSION);
  EXPECT_EQ(after.host, before.host);
  EXPECT_EQ(after.pid, ::getpid());
  EXPECT_EQ(after.processId, before.processId);
  EXPECT_EQ(after.nodeName, before.nodeName);
  EXPECT_EQ(after.nodeAgreement, before.nodeAgreement);
  EXPECT_EQ(after.slab, before.slab);
  EXPECT_EQ(after.fabric, before.fabric);
  EXPECT_EQ(after.lifeline, before.lifeline);
  EXPECT_TRUE(after.group.empty());
}

TEST(Introduction, IsSmallWithDefaultSettings) { EXPECT_LT(serialise(example()).size(), 1000U); }

TEST(Introduction, EveryTruncationIsRefusedByName) {
  const auto blob = serialise(example());
  for (size_t size = 0; size < blob.size(); ++size) {
    const auto text =
        errorOf(ErrorKind::Transport, [&] { parseIntroduction(std::span(blob).first(size), 5); });
    EXPECT_THAT(text, HasSubstr("rank 5")) << size;
  }
}

TEST(Introduction, TrailingBytesAreRefused) {
  auto blob = serialise(example());
  blob.push_back(std::byte{0});
  EXPECT_THAT(errorOf(ErrorKind::Transport, [&] { parseIntroduction(blob, 0); }),
              HasSubstr("1 bytes follow"));
}

TEST(Introduction, DamagedBytesNeverDoMoreThanThrow) {
  const auto blob = serialise(example());
  for (uint32_t seed = 0; seed < 20000; ++seed) {
    std::mt19937 random(seed);
    auto damaged = blob;
    for (uint32_t i = random() % 4; i < 4; ++i) {
      damaged[random() % damaged.size()] = static_cast<std::byte>(random());
    }
    damaged.resize(random() % 2 == 0 ? damaged.size() : random() % damaged.size());
    try {
      // An accepted introduction is well-formed: it is serialised to the same bytes.
      EXPECT_EQ(serialise(parseIntroduction(damaged, 1)), damaged) << "seed " << seed;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("rank 1")) << "seed " << seed;
    }
  }
}

TEST(Introduction, OversizedFieldIsRefusedWhereItComesFrom) {
  Introduction big = example();
  big.fabric = bytes(1025, 0);
  EXPECT_THAT(errorOf(ErrorKind::Usage, [&] { serialise(big); }), HasSubstr("fabric"));
}

TEST(Introduction, AnotherProtocolVersionIsNamed) {
  Introduction other = example();
  other.libraryVersion = "9.9.9";
  auto blob = serialise(other);
  blob[4] ^= std::byte{255};  // protocolVersion; whatever follows the library version may differ
  blob.resize(40);
  EXPECT_THAT(errorOf(ErrorKind::Mismatch, [&] { parseIntroduction(blob, 6); }),
              testing::AllOf(HasSubstr("rank 6"), HasSubstr("9.9.9"), HasSubstr(SMDDP_VERSION)));
}

TEST(Agreement, EqualSettingsAgree) {
  EXPECT_NO_THROW(checkAgreement({example(), example(), example()}));
}

TEST(Agreement, TwoRanksAreNotOneProcess) {
  const Introduction twice = example();
  const auto text = errorOf(ErrorKind::Mismatch, [&] {
    checkAgreement(numbered({example(), twice, example(), twice}));
  });
  EXPECT_THAT(text, HasSubstr("rank 1 ("));
  EXPECT_THAT(text, HasSubstr("rank 3 ("));
}

TEST(Agreement, SettingsThatMayDifferDoNotCount) {
  Settings settings;
  settings.log = "debug";
  settings.interface = "eth7";
  settings.simd = "scalar";
  const Introduction other = introduceThisProcess(settings, randomProcessId());
  EXPECT_NO_THROW(checkAgreement(numbered({example(), other})));
}

TEST(Agreement, DifferenceNamesTheRanksAndTheirValues) {
  Settings settings;
  settings.chunkBytes = 4096;
  settings.algorithm = "allreduce=ring";
  const auto other = introduceThisProcess(settings, randomProcessId());
  const auto text = errorOf(ErrorKind::Mismatch, [&] {
    checkAgreement(numbered({example(), example(), other, example(), other, other}));
  });
  EXPECT_THAT(text, HasSubstr("rank 0 ("));
  EXPECT_THAT(text, HasSubstr("rank 2 ("));
  EXPECT_THAT(text,
              HasSubstr("SMDDP_CHUNK_BYTES is 262144 on ranks 0-1, 3 and 4096 on ranks 2, 4-5"));
  EXPECT_THAT(text, HasSubstr("SMDDP_ALGORITHM is unset on ranks 0-1, 3 and allreduce=ring on"));
  EXPECT_THAT(text, HasSubstr("Give all ranks the same value"));
  EXPECT_THAT(text, testing::Not(HasSubstr("SMDDP_POOL_BYTES")));
}

TEST(Agreement, EachSettingThatPlansDependOnCounts) {
  const std::vector<std::function<void(Settings&)>> changes = {
      [](Settings& s) { s.algorithm = std::string("x"); },
      [](Settings& s) { s.oneShotBytes = 1; },
      [](Settings& s) { s.chunkBytes = 1; },
      [](Settings& s) { s.fabricChunkBytes = 1; },
      [](Settings& s) { s.fabricWindow = 1; },
      [](Settings& s) { s.poolBytes = 1; },
      [](Settings& s) { s.inFlight = 1; },
      [](Settings& s) { s.fusionBytes = 1; },
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    Settings settings;
    changes[i](settings);
    const auto other = introduceThisProcess(settings, randomProcessId());
    EXPECT_THROW(checkAgreement(numbered({example(), other})), Error) << i;
    const auto same = introduceThisProcess(settings, randomProcessId());
    EXPECT_NO_THROW(checkAgreement(numbered({other, same}))) << i;
  }
}

TEST(Agreement, AnotherLibraryVersionIsADifference) {
  Introduction other = example();
  other.libraryVersion = "0.0.1";
  EXPECT_THAT(errorOf(ErrorKind::Mismatch,
                      [&] {
                        checkAgreement(numbered({example(), other}));
                      }),
              HasSubstr("0.0.1"));
}

TEST(NodeName, IsTheSameForProcessesOfOneMachine) {
  EXPECT_EQ(nodeName(Settings()), nodeName(Settings()));
  EXPECT_FALSE(isChosenNodeName(nodeName(Settings())));
}

TEST(NodeName, AChosenNameNeverEqualsAProbedOne) {
  Settings settings;
  settings.nodeId = nodeName(Settings());
  EXPECT_NE(nodeName(settings), nodeName(Settings()));
  EXPECT_TRUE(isChosenNodeName(nodeName(settings)));
}

TEST(NodeName, TooLongAChosenNameIsAUsageError) {
  Settings settings;
  settings.nodeId = std::string(kMaxNodeNameBytes, 'x');
  EXPECT_THAT(errorOf(ErrorKind::Usage, [&] { nodeName(settings); }), HasSubstr("SMDDP_NODE_ID"));
}

TEST(ProcessId, DiffersAndPrints) {
  EXPECT_NE(randomProcessId(), randomProcessId());
  EXPECT_EQ(toString(ProcessId{}), std::string(32, '0'));
}

}  // namespace
}  // namespace smddp::bootstrap
