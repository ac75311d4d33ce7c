#include "collectives/selection.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "collectives/algorithms.h"

namespace smddp::collectives {
namespace {

enum class Nodes : uint8_t { One, Any };
enum class Buffers : uint8_t { Any, Shared };
enum class Size : uint8_t { Any, OneShot };
enum class Preferred : uint8_t { Yes, No };

struct Row {
  Collective collective;
  Choice choice;
  Nodes nodes;  // what it can serve …
  Buffers buffers;
  Size size;            // … and up to which size it is taken
  Preferred preferred;  // No: only when asked for by name
};

// The first preferred row that fits is taken.
// clang-format off
constexpr std::array kTable = {
    // One wait is all that a small vector can afford; copying it costs nothing.
    Row{Collective::AllReduce, {"one_shot", allreduceOneShot},
        Nodes::One, Buffers::Any, Size::OneShot, Preferred::Yes},
    Row{Collective::AllReduce, {"zero_copy", allreduceZeroCopy},
        Nodes::One, Buffers::Shared, Size::Any, Preferred::Yes},
    Row{Collective::AllReduce, {"two_phase", allreduceTwoPhase},
        Nodes::One, Buffers::Any, Size::Any, Preferred::Yes},
    Row{Collective::AllReduce, {"direct", allreduceDirect},
        Nodes::Any, Buffers::Any, Size::Any, Preferred::Yes},
    // Where the network between distant nodes is oversubscribed; nothing here can know that.
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
        Nodes::Any, Buffers::Any, Size::Any, Preferred::Yes},

    Row{Collective::Reduce, {"one_shot", reduceOneShot},
        Nodes::One, Buffers::Any, Size::OneShot, Preferred::Yes},
    Row{Collective::Reduce, {"shared_memory", reduceSharedMemory},
        Nodes::One, Buffers::Any, Size::Any, Preferred::Yes},

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
         // The whole vector lies in one slot.
         (row.size == Size::Any || shape.bytes <= limits.poolBytes);
}

std::string namesOf(Collective collective) {
  std::string names;
  for (const Row& row : kTable) {
    if (row.collective != collective) continue;
    names += (names.empty() ? "" : ", ") + std::string(row.choice.name);
  }
  return names;
}

// `where` is how the user wrote it: "SMDDP_ALGORITHM=…".
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
  raise(ErrorKind::Usage, "{}: {} knows no \"{}\", only {}", where, toString(collective), name,
        namesOf(collective));
}

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(' ');
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(' ') - first + 1);
}

// What the overrides ask for this collective, in their order.
std::vector<const Row*> overriding(Collective collective, const std::string& overrides,
                                   const std::string& where) {
  std::vector<const Row*> rows;
  for (std::string_view rest = overrides; !rest.empty();) {
    const size_t comma = std::min(rest.find(','), rest.size());
    const std::string_view entry = trimmed(rest.substr(0, comma));
    rest.remove_prefix(std::min(comma + 1, rest.size()));
    if (entry.empty()) continue;
    const size_t equals = std::min(entry.find('='), entry.size());
    // Every entry is looked up, so that a mistake shows whichever collective is asked for.
    const Collective named = collectiveCalled(trimmed(entry.substr(0, equals)), where);
    const std::string_view name =
        equals < entry.size() ? trimmed(entry.substr(equals + 1)) : std::string_view{};
    const Row& row = rowCalled(named, name, where);
    if (named == collective) rows.push_back(&row);
  }
  return rows;
}

}  // namespace

const Choice& select(const plan::Topology& t, const plan::Limits& limits, const Shape& shape,
                     int64_t oneShotBytes, const std::string& overrides, const char* origin) {
  const std::string where = fmt::format("{}={}", origin, overrides);
  const auto asked = overriding(shape.collective, overrides, where);
  for (const Row* row : asked) {
    if (canServe(*row, t, limits, shape)) return row->choice;
  }
  if (!asked.empty()) {
    std::string able;
    for (const Row& row : kTable) {
      if (!canServe(row, t, limits, shape)) continue;
      able += (able.empty() ? "" : ", ") + std::string(row.choice.name);
    }
    raise(ErrorKind::Usage,
          "{} names none for {} of {} bytes in {} buffers on {} node(s); add one of {}", where,
          toString(shape.collective), shape.bytes, shape.shared ? "shared" : "private",
          t.numNodes(), able);
  }
  for (const Row& row : kTable) {
    const bool fits = row.size == Size::Any || shape.bytes <= oneShotBytes;
    if (fits && row.preferred == Preferred::Yes && canServe(row, t, limits, shape)) {
      return row.choice;
    }
  }
  raise(ErrorKind::Internal, "no algorithm for {} of {} bytes", toString(shape.collective),
        shape.bytes);
}

void checkOverrides(const std::string& overrides) {
  overriding(Collective::AllReduce, overrides, "SMDDP_ALGORITHM=" + overrides);
}

std::vector<AlgorithmInfo> listAlgorithms() {
  std::vector<AlgorithmInfo> infos;
  for (const Row& row : kTable) {
    std::string serves = row.nodes == Nodes::One ? "one node" : "any nodes";
    if (row.buffers == Buffers::Shared) serves += ", shared buffers";
    if (row.size == Size::OneShot) serves += ", up to the staging memory";
    std::string chosen =
        row.size == Size::OneShot ? "up to SMDDP_ONE_SHOT_BYTES" : "where no row above fits";
    if (row.preferred == Preferred::No) chosen = "by SMDDP_ALGORITHM only";
    infos.push_back({row.collective, row.choice.name, serves, chosen});
  }
  return infos;
}

}  // namespace smddp::collectives
