#include "collectives/selection.h"

#include <algorithm>
#include <array>
#include <bit>
#include <string_view>

#include "collectives/algorithms.h"
#include "common/log.h"

namespace smddp::collectives {
namespace {

enum class Nodes : uint8_t { One, Any };
enum class Buffers : uint8_t { Any, Shared };
enum class Size : uint8_t { Any, OneShot, Tiny };
enum class Encodes : uint8_t { No, Yes };  // knows other wire formats than fp32
enum class Preferred : uint8_t { Yes, Halving, No };

// Up to this size a step, on the network or in shared memory, costs more than its bytes.
constexpr int64_t kTinyBytes = 8 << 10;
// The direct exchange posts 2 (N-1) messages; halving and doubling waits for 2 lg N steps. A step costs as much as
// about 6 messages with TCP in the kernel, and about 13 with EFA. So halving and doubling wins from about 20 nodes on
// with TCP, and from about 55 on with EFA.
constexpr int kManyNodes = 64;
// On a few nodes, too, halving and doubling wins where shards would be too short to let all nodes serve: it divides
// what crosses a link among all of them. Below the first size its steps cost more than the bytes.
constexpr int kFewestCorners = 4;
constexpr int64_t kLeastHalvedBytes = 32 << 10;
// If the number of nodes is not a power of two, recursive doubling takes two steps more, as many as the direct
// exchange in all. From this number of nodes on the messages of the direct exchange cost more than that.
constexpr int kNodesForFolding = 17;

struct Row {
  Collective collective;
  Choice choice;
  Nodes nodes;  // the requests that it can serve …
  Buffers buffers;
  Size size;            // … and up to which size it is selected
  Preferred preferred;  // No: only if asked for by name
  Encodes encodes = Encodes::No;
};

bool isPowerOfTwo(int nodes) { return std::has_single_bit(static_cast<unsigned>(nodes)); }

// The first preferred row that fits is selected.
// clang-format off
constexpr std::array kTable = {
    // For a small vector the waits dominate. This algorithm has one; the copy before it costs nothing.
    Row{Collective::AllReduce, {"one_shot", allreduceOneShot, Preamble::OneShot},
        Nodes::One, Buffers::Any, Size::OneShot, Preferred::Yes},
    Row{Collective::AllReduce, {"zero_copy", allreduceZeroCopy},
        Nodes::One, Buffers::Shared, Size::Any, Preferred::Yes},
    Row{Collective::AllReduce, {"two_phase", allreduceTwoPhase},
        Nodes::One, Buffers::Any, Size::Any, Preferred::Yes},
    Row{Collective::AllReduce, {"recursive_doubling", allreduceRecursiveDoubling, Preamble::CopyIn},
        Nodes::Any, Buffers::Any, Size::Tiny, Preferred::Yes},
    // If the number of nodes is not a power of two, some nodes would send half as many bytes again.
    Row{Collective::AllReduce, {"halving_doubling", allreduceHalvingDoubling},
        Nodes::Any, Buffers::Any, Size::Any, Preferred::Halving},
    Row{Collective::AllReduce, {"direct", allreduceDirect},
        Nodes::Any, Buffers::Any, Size::Any, Preferred::Yes, Encodes::Yes},
    // For networks that are oversubscribed between distant nodes. Only the user knows that.
    Row{Collective::AllReduce, {"ring", allreduceRing},
        Nodes::Any, Buffers::Any, Size::Any, Preferred::No},

    Row{Collective::Broadcast, {"shared_memory", broadcastSharedMemory},
        Nodes::One, Buffers::Any, Size::Any, Preferred::Yes},
    Row{Collective::Broadcast, {"chain", broadcastChain},
        Nodes::Any, Buffers::Any, Size::Any, Preferred::Yes},

    Row{Collective::AllGather, {"shared_memory", allgatherSharedMemory},
        Nodes::One, Buffers::Any, Size::Any, Preferred::Yes},
    Row{Collective::AllGather, {"mesh", allgatherMesh},
        Nodes::Any, Buffers::Any, Size::Any, Preferred::Yes},

    Row{Collective::ReduceScatter, {"shared_memory", reduceScatterSharedMemory},
        Nodes::One, Buffers::Any, Size::Any, Preferred::Yes},
    Row{Collective::ReduceScatter, {"direct", reduceScatterDirect},
        Nodes::Any, Buffers::Any, Size::Any, Preferred::Yes, Encodes::Yes},

    Row{Collective::Reduce, {"one_shot", reduceOneShot, Preamble::CopyIn},
        Nodes::One, Buffers::Any, Size::OneShot, Preferred::Yes},
    Row{Collective::Reduce, {"shared_memory", reduceSharedMemory},
        Nodes::One, Buffers::Any, Size::Any, Preferred::Yes},
    Row{Collective::Reduce, {"direct", reduceDirect},
        Nodes::Any, Buffers::Any, Size::Any, Preferred::Yes, Encodes::Yes},

    Row{Collective::Gather, {"direct", gatherDirect},
        Nodes::Any, Buffers::Any, Size::Any, Preferred::Yes},
    Row{Collective::Scatter, {"direct", scatterDirect},
        Nodes::Any, Buffers::Any, Size::Any, Preferred::Yes},
    Row{Collective::AllToAll, {"direct", alltoallDirect},
        Nodes::Any, Buffers::Any, Size::Any, Preferred::Yes},

    Row{Collective::Barrier, {"exchange", barrierExchange},
        Nodes::Any, Buffers::Any, Size::Any, Preferred::Yes},
};
// clang-format on

bool canServe(const Row& row, const plan::Topology& t, const plan::Limits& limits,
              const Shape& shape) {
  return row.collective == shape.collective && (row.nodes == Nodes::Any || t.numNodes() == 1) &&
         (row.buffers == Buffers::Any || shape.shared) &&
         (row.choice.preamble == Preamble::NoCopy || !shape.afterArrival) &&
         (row.encodes == Encodes::Yes || shape.wire == Wire::fp32) &&
         // The whole vector lies in one slot; recursive doubling (Tiny) needs more slots beside it.
         (row.size == Size::Any ||
          shape.bytes <= (row.size == Size::Tiny ? limits.halfBytes / 2 : limits.halfBytes));
}

// True if steps over half the nodes each suit the vector, and the number of nodes allows them.
bool suitsHalving(const plan::Topology& t, const plan::Limits& limits, const Shape& shape) {
  const int nodes = t.numNodes();
  if (!isPowerOfTwo(nodes) || nodes < kFewestCorners) return false;
  const int64_t share = shape.bytes / t.numRails();
  return nodes >= kManyNodes ||
         (share >= kLeastHalvedBytes && share < nodes * (limits.messageBytes / 4));
}

bool isPreferred(const Row& row, const plan::Topology& t, const plan::Limits& limits,
                 const Shape& shape, int64_t oneShotBytes) {
  const int nodes = t.numNodes();
  if (row.size == Size::OneShot) {
    const int64_t read = shape.bytes * (t.teamSize() - 1);
    // With shared buffers the other algorithms copy nothing, so they are faster from a smaller size on.
    if (read > (shape.shared ? std::min(oneShotBytes, kTinyBytes) : oneShotBytes)) return false;
  }
  if (row.size == Size::Tiny) {
    return shape.bytes <= kTinyBytes && (isPowerOfTwo(nodes) || nodes >= kNodesForFolding);
  }
  if (row.preferred == Preferred::Halving) return suitsHalving(t, limits, shape);
  return row.preferred == Preferred::Yes;
}

std::string namesOf(Collective collective) {
  std::string names;
  for (const Row& row : kTable) {
    if (row.collective != collective) continue;
    names += (names.empty() ? "" : ", ") + std::string(row.choice.name);
  }
  return names;
}

// `where` quotes what the user wrote: "SMDDP_ALGORITHM=…".
Collective collectiveCalled(std::string_view name, const std::string& where) {
  std::string names;
  for (int i = 0; i < kNumCollectives; ++i) {
    const auto collective = static_cast<Collective>(i);
    if (name == toString(collective)) return collective;
    names += (i == 0 ? "" : ", ") + std::string(toString(collective));
  }
  raise(ErrorKind::Usage,
        "{}: \"{}\" is not a collective; write collective=name[,...] with one of {}, for example "
        "allreduce=ring",
        where, name, names);
}

const Row& rowCalled(Collective collective, std::string_view name, const std::string& where) {
  for (const Row& row : kTable) {
    if (row.collective == collective && name == row.choice.name) return row;
  }
  raise(ErrorKind::Usage, "{}: {} has no algorithm \"{}\", only {}", where, toString(collective),
        name, namesOf(collective));
}

// The row of the table that the tuning file names for this request. Null if it names none that can serve it, or
// built_in.
const Row* measuredBest(const Tuning& tuning, const plan::Topology& t, const plan::Limits& limits,
                        const Shape& shape) {
  if (tuning.rows().empty()) return nullptr;
  const char* memory = shape.shared ? "shared" : "private";
  for (const TuningRow& row : tuning.rows()) {
    if (!fits(row, t, shape)) continue;
    const std::string where = fmt::format("{}:{}", tuning.origin(), row.line);
    const Row* asked =
        row.algorithm == kBuiltIn ? nullptr : &rowCalled(row.collective, row.algorithm, where);
    if (asked && !canServe(*asked, t, limits, shape)) continue;
    SMDDP_LOG(Trace, "collectives", "{} of {} bytes in {} memory: {} says {}",
              toString(shape.collective), shape.bytes, memory, where, row.algorithm);
    return asked;
  }
  SMDDP_LOG(Trace, "collectives", "{} of {} bytes in {} memory: no row of {} matches",
            toString(shape.collective), shape.bytes, memory, tuning.origin());
  return nullptr;
}

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(' ');
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(' ') - first + 1);
}

// The rows that the overrides name for this collective, in their order.
std::vector<const Row*> overriding(Collective collective, const std::string& overrides,
                                   const std::string& where) {
  std::vector<const Row*> rows;
  for (std::string_view rest = overrides; !rest.empty();) {
    const size_t comma = std::min(rest.find(','), rest.size());
    const std::string_view entry = trimmed(rest.substr(0, comma));
    rest.remove_prefix(std::min(comma + 1, rest.size()));
    if (entry.empty()) continue;
    const size_t equals = std::min(entry.find('='), entry.size());
    // Look up every entry, so that a mistake in any of them is reported.
    const Collective named = collectiveCalled(trimmed(entry.substr(0, equals)), where);
    const std::string_view name =
        equals < entry.size() ? trimmed(entry.substr(equals + 1)) : std::string_view{};
    const Row& row = rowCalled(named, name, where);
    if (named == collective) rows.push_back(&row);
  }
  return rows;
}

}  // namespace

const Choice* find(const plan::Topology& t, const plan::Limits& limits, const Shape& shape,
                   int64_t oneShotBytes, const std::string& overrides, const char* origin,
                   const Tuning& tuning) {
  const auto asked =
      overriding(shape.collective, overrides, fmt::format("{}={}", origin, overrides));
  for (const Row* row : asked) {
    if (canServe(*row, t, limits, shape)) return &row->choice;
  }
  // Shape::afterArrival rules out algorithms because of other ranks' buffers. That is not the user's mistake.
  if (!asked.empty() && !shape.afterArrival) return nullptr;
  if (const Row* row = measuredBest(tuning, t, limits, shape)) return &row->choice;
  for (const Row& row : kTable) {
    if (isPreferred(row, t, limits, shape, oneShotBytes) && canServe(row, t, limits, shape)) {
      return &row.choice;
    }
  }
  raise(ErrorKind::Internal, "no algorithm for {} of {} bytes", toString(shape.collective),
        shape.bytes);
}

const Choice& select(const plan::Topology& t, const plan::Limits& limits, const Shape& shape,
                     int64_t oneShotBytes, const std::string& overrides, const char* origin,
                     const Tuning& tuning) {
  if (const Choice* found = find(t, limits, shape, oneShotBytes, overrides, origin, tuning)) {
    return *found;
  }
  std::string able;
  for (const Row& row : kTable) {
    if (!canServe(row, t, limits, shape)) continue;
    able += (able.empty() ? "" : " or ") + std::string(row.choice.name);
  }
  const bool isEncoded = shape.wire != Wire::fp32;
  raise(ErrorKind::Usage,
        "{}={} names no algorithm for {} of {} bytes in {} buffers on {} node(s){}; add to it {}{}",
        origin, overrides, toString(shape.collective), shape.bytes,
        shape.shared ? "shared" : "private", t.numNodes(),
        isEncoded ? fmt::format(" that travels as {}", toString(shape.wire)) : "", able,
        isEncoded ? ", or let it travel as fp32 (SMDDP_WIRE)" : "");
}

Wire encodedAs(const plan::Topology& t, Collective collective, int64_t bytes, Wire wanted) {
  const bool isEncodable = isReduction(collective) && bytes > kTinyBytes && t.numNodes() > 1;
  return isEncodable ? wanted : Wire::fp32;
}

bool knowsFormats(Collective collective, const std::string& overrides, const char* origin) {
  const auto asked = overriding(collective, overrides, fmt::format("{}={}", origin, overrides));
  const auto encodes = [](const Row* row) { return row->encodes == Encodes::Yes; };
  return asked.empty() || std::any_of(asked.begin(), asked.end(), encodes);
}

void checkOverrides(const std::string& overrides, const char* origin) {
  overriding(Collective::AllReduce, overrides, fmt::format("{}={}", origin, overrides));
}

std::vector<std::string> algorithmsOf(Collective collective) {
  std::vector<std::string> names;
  for (const Row& row : kTable) {
    if (row.collective == collective) names.emplace_back(row.choice.name);
  }
  return names;
}

std::vector<AlgorithmInfo> listAlgorithms() {
  std::vector<AlgorithmInfo> infos;
  for (const Row& row : kTable) {
    std::string serves = row.nodes == Nodes::One ? "one node" : "any nodes";
    if (row.buffers == Buffers::Shared) serves += ", shared buffers";
    if (row.size == Size::OneShot) serves += ", up to the staging memory";
    if (row.size == Size::Tiny) serves += ", up to half of the staging memory";
    const bool first = infos.empty() || infos.back().collective != row.collective;
    std::string chosen = first ? "always" : "where no row above fits";
    if (row.size == Size::OneShot) chosen = "where it reads up to SMDDP_ONE_SHOT_BYTES of others";
    if (row.size == Size::Tiny) {
      chosen = fmt::format("up to {} KiB on 2, 4, 8, 16 nodes, and on {} or more", kTinyBytes >> 10,
                           kNodesForFolding);
    }
    if (row.preferred == Preferred::Halving) {
      chosen = fmt::format(
          "on {}, {}, ... nodes; on 4, 8, 16, 32 for shares from {} KiB to less than 64 KiB a node",
          kManyNodes, 2 * kManyNodes, kLeastHalvedBytes >> 10);
    }
    if (row.preferred == Preferred::No) chosen = "by SMDDP_ALGORITHM only";
    infos.push_back({row.collective, row.choice.name, serves, chosen});
  }
  return infos;
}

}  // namespace smddp::collectives
