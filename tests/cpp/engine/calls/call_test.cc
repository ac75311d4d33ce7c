// The parts of a call that ranks compare, and the text of a call in errors.
#include "engine/calls/call.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <utility>

#include "engine/calls/ended_operations.h"

namespace smddp::engine::calls {
namespace {

using collectives::Collective;
using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;

Request requestFor(Collective collective, ReduceOp op = ReduceOp::SUM) {
  Request request;
  request.collective = collective;
  request.type = DataType::float32;
  request.op = op;
  request.factor = 0.5;
  request.root = 3;
  request.bytes = 4000;
  return request;
}

std::string told(const Request& request) { return describe(fingerprint(request)); }

TEST(Call, IsToldInWords) {
  EXPECT_EQ(told(requestFor(Collective::AllReduce)), "allreduce of 1000 float32 (4000 B) with SUM");
  EXPECT_EQ(told(requestFor(Collective::AllGather)), "allgather of 4000 B");
  EXPECT_EQ(told(requestFor(Collective::AllReduce, ReduceOp::PREMUL_SUM)),
            "allreduce of 1000 float32 (4000 B) with PREMUL_SUM by 0.5");
  EXPECT_EQ(told(requestFor(Collective::Reduce)),
            "reduce of 1000 float32 (4000 B) with SUM to rank 3");
  EXPECT_EQ(told(requestFor(Collective::Reduce, ReduceOp::PREMUL_SUM)),
            "reduce of 1000 float32 (4000 B) with PREMUL_SUM by 0.5 to rank 3");
  EXPECT_THAT(told(requestFor(Collective::Broadcast)), EndsWith("from rank 3"));
  EXPECT_THAT(told(requestFor(Collective::Scatter)), EndsWith("from rank 3"));
  EXPECT_THAT(told(requestFor(Collective::Gather)), EndsWith("to rank 3"));
  EXPECT_THAT(told(requestFor(Collective::AllToAll)), Not(HasSubstr("rank")));
  EXPECT_EQ(told(requestFor(Collective::Barrier)), "barrier");
}

// For a call that consists of several operations, errors name the call, not the operation with its fingerprint.
TEST(Call, MadeOfMessagesIsToldByItsName) {
  Request splits = requestFor(Collective::Barrier);
  splits.partOf = PartOf::AllToAllWithSplits;
  EXPECT_EQ(told(splits), "alltoall with split sizes");
  EXPECT_FALSE(sameCall(fingerprint(splits), fingerprint(requestFor(Collective::Barrier))));
  Request sparse = requestFor(Collective::AllGather);
  sparse.partOf = PartOf::SparseAllReduce;
  EXPECT_EQ(told(sparse), "allreduce of a sparse tensor");
  Request split = requestFor(Collective::AllGather);
  split.partOf = PartOf::SplitGroup;
  EXPECT_EQ(told(split), "split_group");
  Request block = requestFor(Collective::Broadcast);
  block.partOf = PartOf::UnevenAllGather;
  EXPECT_THAT(told(block), EndsWith("from rank 3, for all_gather of blocks of several sizes"));
  block.collective = Collective::Reduce;
  block.partOf = PartOf::UnevenReduceScatter;
  EXPECT_THAT(told(block), EndsWith("to rank 3, for reduce_scatter of blocks of several sizes"));
  transport::CallFingerprint unknown = fingerprint(splits);
  unknown.flags = 77;
  EXPECT_EQ(describe(unknown), "an unknown operation");
  EXPECT_EQ(describeTag(3), "with tag 3");
  EXPECT_EQ(describeTag(-20), "within a collective");
}

// A scaled reduce has a factor and a root. A difference in one of them is another call.
TEST(Call, DiffersWithEveryPartOfTheRequest) {
  const Request usual = requestFor(Collective::Reduce, ReduceOp::PREMUL_SUM);
  std::vector<Request> others(6, usual);
  others[0].collective = Collective::AllReduce;
  others[1].type = DataType::int32;
  others[2].op = ReduceOp::SUM;
  others[3].factor = 0.25;
  others[4].root = 4;
  others[5].bytes = 4004;
  for (size_t i = 0; i < others.size(); ++i) {
    EXPECT_FALSE(sameCall(fingerprint(usual), fingerprint(others[i]))) << i;
  }
  EXPECT_TRUE(sameCall(fingerprint(usual), fingerprint(Request(usual))));
}

TEST(Call, OfUnknownBytesIsNoneThatIsKnown) {
  transport::CallFingerprint call = fingerprint(requestFor(Collective::Reduce));
  call.collective = collectives::kNumCollectives;
  EXPECT_EQ(describe(call), "an unknown operation");
}

// No two collectives have the same name.
TEST(Call, NamesEveryCollective) {
  std::set<std::string> names;
  for (int i = 0; i < collectives::kNumCollectives; ++i) {
    names.insert(toString(static_cast<Collective>(i)));
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(collectives::kNumCollectives));
  EXPECT_EQ(names.count("?"), 0u);
}

// Whoever frees a tensor may wait for Python's interpreter, so the engine's owner only collects.
TEST(EndedOperations, MemoryIsFreedByWhoTakesTheLeftovers) {
  EndedOperations ended;
  const auto held = [](auto&& give) {
    auto memory = std::make_shared<int>(1);
    const std::weak_ptr<int> seen = memory;
    give(std::move(memory));
    return seen;
  };
  const auto released = held([&](auto memory) { ended.release(std::move(memory)); });
  const auto kept = held([&](auto memory) { ended.keep(std::move(memory)); });
  EXPECT_FALSE(released.expired());
  {
    Leftovers leftovers;
    ended.moveTo(leftovers);
    EXPECT_FALSE(released.expired());
  }
  EXPECT_TRUE(released.expired());
  EXPECT_FALSE(kept.expired()) << "the group lives";
  ended.releaseKept();
  EXPECT_FALSE(kept.expired());
  {
    Leftovers leftovers;
    ended.moveTo(leftovers);
  }
  EXPECT_TRUE(kept.expired());
}

}  // namespace
}  // namespace smddp::engine::calls
