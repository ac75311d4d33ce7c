#include "collectives/tuning.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "collectives/selection.h"

namespace smddp::collectives {
namespace {

using testing::HasSubstr;
using testing::StartsWith;
using testing::StrEq;

const plan::Topology kOneNode({{0, 1}}, 0);
const plan::Topology kTwoNodes({{0, 1}, {2, 3}}, 0);
const plan::Topology kUneven({{0, 1, 2}, {3}}, 0);

constexpr const char* kExample =
    "# measured on a Tuesday\n"
    "\n"
    "smddp-tuning 1\n"
    "allreduce 1x2 private 4096 two_phase  # one_shot is slower here\n"
    "allreduce\t1x2 any 100000000 one_shot\n"
    "allreduce 1x2 shared max two_phase\r\n"
    "allreduce 2x2 any 65536 ring\n"
    "broadcast 3+1 any max chain";

const char* chosen(const plan::Topology& t, Collective collective, int64_t bytes, bool shared,
                   const Tuning& tuning, const std::string& overrides = "") {
  const Shape shape{collective, bytes, 0, shared};
  return select(t, {}, shape, 1024, overrides, "SMDDP_ALGORITHM", tuning).name;
}

std::string refusal(const std::string& text) {
  try {
    Tuning::parse(text, "t.txt");
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::Usage);
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Tuning, TakesTheFirstRowThatFitsAndCanServe) {
  const Tuning tuning = Tuning::parse(kExample, "t.txt");
  ASSERT_EQ(tuning.rows().size(), 5u);
  EXPECT_EQ(tuning.rows().front().line, 4);
  const auto allreduce = [&](int64_t bytes, bool shared) {
    return chosen(kOneNode, Collective::AllReduce, bytes, shared, tuning);
  };
  EXPECT_THAT(allreduce(8, false), StrEq("two_phase"));
  EXPECT_THAT(allreduce(4096, false), StrEq("two_phase"));
  EXPECT_THAT(allreduce(4097, false), StrEq("one_shot"));
  EXPECT_THAT(allreduce(8, true), StrEq("one_shot"));
  // The row's algorithm does not fit into the staging memory: the next row that can serve is taken, or the table.
  EXPECT_THAT(allreduce(50 << 20, true), StrEq("two_phase"));
  EXPECT_THAT(allreduce(50 << 20, false), StrEq("two_phase"));
  EXPECT_THAT(allreduce(200 << 20, true), StrEq("two_phase"));
}

// For sizes with built_in, the table chooses by its own limits.
TEST(Tuning, LeavesToTheTableWhatItSays) {
  const Tuning tuning = Tuning::parse(
      "smddp-tuning 1\nallreduce 1x2 any 8192 built_in\nallreduce 1x2 any max one_shot\n", "t.txt");
  for (const int64_t bytes : {8, 1024, 1025, 8192}) {
    EXPECT_THAT(chosen(kOneNode, Collective::AllReduce, bytes, false, tuning),
                StrEq(chosen(kOneNode, Collective::AllReduce, bytes, false, {})))
        << bytes;
  }
  EXPECT_THAT(chosen(kOneNode, Collective::AllReduce, 8193, false, tuning), StrEq("one_shot"));
}

TEST(Tuning, IsForTheLayoutThatItNames) {
  const Tuning tuning = Tuning::parse(kExample, "t.txt");
  EXPECT_THAT(chosen(kTwoNodes, Collective::AllReduce, 65536, false, tuning), StrEq("ring"));
  EXPECT_THAT(chosen(kTwoNodes, Collective::AllReduce, 65537, false, tuning), StrEq("direct"));
  EXPECT_THAT(chosen(kUneven, Collective::AllReduce, 65536, false, tuning), StrEq("direct"));
  EXPECT_THAT(chosen(kUneven, Collective::Broadcast, 1 << 20, false, tuning), StrEq("chain"));
}

TEST(Tuning, GivesWayToOverrides) {
  const Tuning tuning = Tuning::parse(kExample, "t.txt");
  EXPECT_THAT(chosen(kTwoNodes, Collective::AllReduce, 64, false, tuning, "allreduce=direct"),
              StrEq("direct"));
  EXPECT_THAT(chosen(kTwoNodes, Collective::AllReduce, 64, false, tuning, "broadcast=chain"),
              StrEq("ring"));
}

TEST(Tuning, SaysWhichLineIsWrong) {
  EXPECT_THAT(refusal(""), HasSubstr("t.txt: a tuning file begins with \"smddp-tuning 1\""));
  EXPECT_THAT(refusal("\nallreduce 1x2 any 8 ring"), StartsWith("t.txt:2: a tuning file begins"));
  EXPECT_THAT(refusal("smddp-tuning 2\n"), StartsWith("t.txt:1: "));
  const auto row = [](const std::string& text) { return refusal("smddp-tuning 1\n\n" + text); };
  EXPECT_THAT(row("allreduce 1x2 any 8"), HasSubstr("t.txt:3: a row has 5 fields, not 4"));
  EXPECT_THAT(row("allreduce 1x2 any 8 ring ring"), HasSubstr("not 6"));
  EXPECT_THAT(row("allredcue 1x2 any 8 ring"),
              HasSubstr("t.txt:3: \"allredcue\" is not a collective"));
  for (const char* layout : {"2y2", "0x2", "2x0", "x", "2x", "1+", "+", "1+0", "-1x2", "2x2x2",
                             "99999999999999999999x1", "65537x1", "1x4097", "1e3"}) {
    EXPECT_THAT(row(fmt::format("allreduce {} any 8 ring", layout)),
                HasSubstr("is not a layout of ranks"))
        << layout;
  }
  EXPECT_THAT(row("allreduce 1x2 here 8 ring"), HasSubstr("is not a kind of memory"));
  EXPECT_THAT(row("allreduce 2x2 shared 8 ring"), HasSubstr("must not depend on memory"));
  for (const char* bytes : {"-1", "8k", "", "9223372036854775808", "0x8", "maximum"}) {
    EXPECT_THAT(row(fmt::format("allreduce 1x2 any \x22{}\x22 ring", bytes)),
                HasSubstr("is not a number of bytes"))
        << bytes;
  }
  EXPECT_THAT(row("allreduce 1x2 any 8 rign"),
              HasSubstr("t.txt:3: allreduce has no algorithm \"rign\""));
  EXPECT_THAT(row("broadcast 1x2 any 8 ring"), HasSubstr("only shared_memory, chain, built_in"));
}

// For any bytes the result is rows, or an error that names the file.
TEST(Tuning, SurvivesDamagedFiles) {
  const unsigned seed = 20261121;
  std::mt19937 random(seed);
  const std::string whole = kExample;
  int refused = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    std::string text = whole.substr(0, random() % (whole.size() + 1));
    for (unsigned change = random() % 4; change > 0 && !text.empty(); --change) {
      text[random() % text.size()] = static_cast<char>(random());
    }
    try {
      EXPECT_LE(Tuning::parse(text, "t.txt").rows().size(), 5u) << "seed " << seed;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), StartsWith("t.txt")) << "seed " << seed;
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
}

TEST(Tuning, DigestTellsWhetherRanksWouldChooseAlike) {
  const Tuning one = Tuning::parse(kExample, "a"), same = Tuning::parse(kExample, "b");
  const Tuning other = Tuning::parse("smddp-tuning 1\nallreduce 2x2 any 65535 ring", "a");
  EXPECT_EQ(one.digest(""), same.digest(""));
  EXPECT_NE(one.digest(""), other.digest(""));
  EXPECT_NE(one.digest(""), one.digest("allreduce=ring"));
  EXPECT_NE(Tuning().digest(""), one.digest(""));
}

TEST(Tuning, ReadsFilesAndSaysWhatIsWrongWithThem) {
  const auto folder = std::filesystem::path(testing::TempDir()) / fmt::format("tuning{}", getpid());
  std::filesystem::create_directory(folder);
  const auto write = [&](const char* name, const std::string& text) {
    std::ofstream(folder / name, std::ios::binary) << text;
    return (folder / name).string();
  };
  const auto failure = [](const std::string& path) -> std::string {
    try {
      Tuning::read(path);
    } catch (const Error& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  EXPECT_EQ(Tuning::read(write("good", kExample)).rows().size(), 5u);
  EXPECT_THAT(failure((folder / "absent").string()), HasSubstr("cannot be opened"));
  EXPECT_THAT(failure(folder.string()), HasSubstr("cannot be read"));
  EXPECT_THAT(failure(write("large", std::string(2 << 20, '\n'))),
              HasSubstr("bytes are not a tuning"));
  EXPECT_THAT(failure(write("bad", "smddp-tuning 1\nx")), HasSubstr("bad:2: "));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace smddp::collectives
