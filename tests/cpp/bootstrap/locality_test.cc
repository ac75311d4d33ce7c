#include "bootstrap/locality.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "common/error.h"

namespace smddp::bootstrap {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// One introduction per name; ids are 1, 2, ….
std::vector<Introduction> ranks(const std::vector<std::string>& nodeNames) {
  std::vector<Introduction> result(nodeNames.size());
  for (size_t i = 0; i < nodeNames.size(); ++i) {
    result[i].jobRank = static_cast<Rank>(i);
    result[i].host = "host" + std::to_string(i);
    result[i].nodeName = nodeNames[i];
    result[i].processId.fill(static_cast<std::byte>(i + 1));
  }
  return result;
}

std::vector<ProbeReport> allWell(size_t size) { return std::vector<ProbeReport>(size); }

TEST(Locality, CandidatesThatReachOneAnotherAreANode) {
  const auto all = ranks({"a", "b", "a", "b", "c"});
  EXPECT_TRUE(needsProbing(all));
  const Locality result = decideLocality(all, allWell(5), 0);
  EXPECT_THAT(result.nodeOfRank, ElementsAre("a", "b", "a", "b", "c"));
  EXPECT_NE(result.agreement, 0U);
  EXPECT_TRUE(result.warnings.empty());
}

TEST(Locality, NobodyToReachNeedsNoProbing) {
  EXPECT_FALSE(needsProbing(ranks({"a"})));
  EXPECT_FALSE(needsProbing(ranks({"a", "b", "c"})));
}

TEST(Locality, AgreementIsEqualOnANodeAndDiffersBetweenNodes) {
  const auto all = ranks({"a", "b", "a", "b"});
  const auto agreement = [&](Rank me) { return decideLocality(all, allWell(4), me).agreement; };
  EXPECT_EQ(agreement(0), agreement(2));
  EXPECT_EQ(agreement(1), agreement(3));
  EXPECT_NE(agreement(0), agreement(1));
}

TEST(Locality, ARankOutOfResourcesIsNamedOnAllRanks) {
  for (const char* name : {"boot:x", "id:x"}) {
    const auto all = ranks({name, name, "other"});
    auto reports = allWell(3);
    reports[1].failures.push_back({0, "Too many open files", true});
    for (Rank me = 0; me < 3; ++me) {
      try {
        decideLocality(all, reports, me);
        FAIL() << "rank " << me;
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::Resource);
        EXPECT_THAT(error.what(), HasSubstr("rank 1 (host1"));
      }
    }
  }
}

TEST(Locality, SubgroupsOfANodeAreAcquainted) {
  auto all = ranks({"a", "a", "a"});
  const uint64_t agreement = decideLocality(all, allWell(3), 0).agreement;
  for (auto& one : all) one.nodeAgreement = agreement;
  const std::vector<Introduction> sub = {all[0], all[2]};
  EXPECT_FALSE(needsProbing(sub));
  const Locality result = decideLocality(sub, {}, 1);
  EXPECT_THAT(result.nodeOfRank, ElementsAre("a", "a"));
  // It is still the agreement of the larger set, so that the next sub-group is known, too.
  EXPECT_EQ(result.agreement, agreement);
}

TEST(Locality, AProcessThatWasNotThereMustBeProbed) {
  auto all = ranks({"a", "a", "a"});
  all[0].nodeAgreement = all[1].nodeAgreement = 77;
  EXPECT_TRUE(needsProbing(all));
  // Each of them is known to other ranks, but they do not know each other.
  all[2].nodeAgreement = 78;
  EXPECT_TRUE(needsProbing({all[1], all[2]}));
  EXPECT_FALSE(needsProbing({all[0], all[1]}));
}

TEST(Locality, ARankAloneKeepsItsAgreement) {
  auto all = ranks({"a", "b"});
  all[0].nodeAgreement = 77;
  EXPECT_EQ(decideLocality(all, {}, 0).agreement, 77U);
}

TEST(Locality, AFailingProbeSplitsItsCandidatesOnly) {
  const auto all = ranks({"a", "b", "a", "b", "a"});
  auto reports = allWell(5);
  reports[4].failures.push_back({2, "hidepid"});
  const Locality result = decideLocality(all, reports, 0);
  EXPECT_THAT(result.nodeOfRank, ElementsAre("a#0", "b", "a#2", "b", "a#4"));
  EXPECT_EQ(result.agreement, 0U);
  ASSERT_EQ(result.warnings.size(), 1U);
  EXPECT_THAT(result.warnings[0], HasSubstr("rank 4 (host4"));
  EXPECT_THAT(result.warnings[0], HasSubstr("rank 2 (host2"));
  EXPECT_THAT(result.warnings[0], HasSubstr("hidepid"));
  EXPECT_NE(decideLocality(all, reports, 1).agreement, 0U);
}

TEST(Locality, AFailingProbeUnderAChosenNameIsAnError) {
  const auto all = ranks({"id:x", "b", "id:x"});
  auto reports = allWell(3);
  reports[2].failures.push_back({0, "no such process"});
  std::vector<std::string> texts;
  for (Rank me = 0; me < 3; ++me) {
    try {
      decideLocality(all, reports, me);
      FAIL() << "rank " << me << " accepted it";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::Usage);
      texts.push_back(error.what());
    }
  }
  EXPECT_THAT(texts[0], HasSubstr("SMDDP_NODE_ID"));
  EXPECT_THAT(texts[0], HasSubstr("rank 2 (host2"));
  EXPECT_THAT(texts[0], HasSubstr("no such process"));
  EXPECT_THAT(texts, testing::Each(texts[0]));
}

TEST(ProbeReport, SurvivesTheStore) {
  const ProbeReport before{{{3, "first"}, {0, std::string(1000, 'x'), true}}};
  const ProbeReport after = parseProbeReport(serialise(before), 1, 4);
  ASSERT_EQ(after.failures.size(), 2U);
  EXPECT_FALSE(after.failures[0].exhausted);
  EXPECT_TRUE(after.failures[1].exhausted);
  EXPECT_EQ(after.failures[0].rank, 3);
  EXPECT_EQ(after.failures[0].why, "first");
  // A long explanation is cut, not refused.
  EXPECT_EQ(after.failures[1].why, std::string(256, 'x'));
}

TEST(ProbeReport, MalformedOnesAreRefusedByName) {
  const auto blob = serialise(ProbeReport{{{3, "first"}, {2, "second"}}});
  EXPECT_NO_THROW(parseProbeReport(blob, 1, 4));
  EXPECT_THROW(parseProbeReport(blob, 1, 3), Error);  // rank 3 of 3
  for (size_t size = 0; size < blob.size(); ++size) {
    EXPECT_THROW(parseProbeReport(std::span(blob).first(size), 1, 4), Error) << size;
  }
  for (uint32_t seed = 0; seed < 5000; ++seed) {
    std::mt19937 random(seed);
    auto damaged = blob;
    damaged[random() % damaged.size()] = static_cast<std::byte>(random());
    try {
      for (const auto& failure : parseProbeReport(damaged, 1, 4).failures) {
        EXPECT_LT(failure.rank, 4) << "seed " << seed;
      }
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("rank 1")) << "seed " << seed;
    }
  }
}

}  // namespace
}  // namespace smddp::bootstrap
