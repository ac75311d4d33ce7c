// Algorithms chosen by measurement. `python -m smddp.bench --tune` writes the file; SMDDP_TUNING_FILE names it. It is
// text with one row per line; blanks separate fields, and # begins a comment:
//
//   smddp-tuning 1
//   # collective  ranks  memory   bytes   algorithm
//   allreduce     1x4    private  16384   one_shot
//   allreduce     1x4    private  262144  built_in
//   allreduce     1x4    shared   max     zero_copy
//   allreduce     2x2    any      8192    recursive_doubling
//
// A row applies to groups of exactly this layout, written as nodes x ranks (2x2) or as the ranks of each node
// (3+1), and to vectors of up to this number of bytes. The first row that fits and whose algorithm can serve the
// request is taken; built_in means the library's own table (selection.h). All nodes of a group must choose alike,
// but one may have shared and another private buffers. So for several nodes memory is always "any".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/collective.h"

namespace smddp::collectives {

inline constexpr std::string_view kBuiltIn = "built_in";

struct TuningRow {
  Collective collective = Collective::AllReduce;
  std::vector<int> ranksOfNodes;
  bool whenPrivate = true, whenShared = true;  // the kinds of buffers that the row is for
  int64_t maxBytes = 0;
  std::string algorithm;  // or kBuiltIn
  int line = 0;
};

// The rows of a tuning file. Immutable, so any thread may use it.
class Tuning {
 public:
  // No rows: the built-in table decides.
  Tuning() = default;
  // Throws Usage for a line that it cannot parse. The error names `origin` and the line, and says what is allowed.
  static Tuning parse(std::string_view text, const std::string& origin);
  // Parses a file. Throws Usage also if it cannot be read. No rows if `path` is empty.
  static Tuning read(const std::string& path);

  const std::vector<TuningRow>& rows() const { return rows_; }
  const std::string& origin() const { return origin_; }
  // A hash of the rows and of `more`, without the path. Ranks compare it.
  uint64_t digest(std::string_view more) const;

 private:
  std::string origin_;
  std::vector<TuningRow> rows_;
};

// True if the row's layout is that of the topology.
bool isForLayout(const TuningRow& row, const plan::Topology& topology);
// True if the row applies to this request. Does not check that its algorithm can serve it.
bool fits(const TuningRow& row, const plan::Topology& topology, const Shape& shape);

}  // namespace smddp::collectives
