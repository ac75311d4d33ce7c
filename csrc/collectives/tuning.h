// Algorithms chosen by measurement: the file that `python -m smddp.bench --tune` writes and SMDDP_TUNING_FILE
// names. Text, a row a line, fields separated by blanks, # begins a comment:
//
//   smddp-tuning 1
//   # collective  ranks  memory   bytes   algorithm
//   allreduce     1x4    private  16384   one_shot
//   allreduce     1x4    private  262144  built_in
//   allreduce     1x4    shared   max     zero_copy
//   allreduce     2x2    any      8192    recursive_doubling
//
// A row is for groups of exactly that layout, written as nodes x ranks (2x2) or as the ranks of each node
// (3+1), and for vectors of up to so many bytes. The first row that fits and can serve is taken; built_in leaves
// them to the library's own table (selection.h). Several nodes have to choose alike although their buffers may lie
// differently: for them memory is always "any".
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
  bool whenPrivate = true, whenShared = true;  // where the buffers lie
  int64_t maxBytes = 0;
  std::string algorithm;  // or kBuiltIn
  int line = 0;
};

// Immutable after it was read. Threads: any.
class Tuning {
 public:
  // No rows: the built-in table decides.
  Tuning() = default;
  // Throws Usage naming the line of `origin` that cannot be understood, and what would be.
  static Tuning parse(std::string_view text, const std::string& origin);
  // The same; throws Usage too when the file cannot be read.
  static Tuning read(const std::string& path);

  const std::vector<TuningRow>& rows() const { return rows_; }
  const std::string& origin() const { return origin_; }
  // Ranks compare it: equal for equal rows, wherever the file lies, and equal `more`.
  uint64_t digest(std::string_view more) const;

 private:
  std::string origin_;
  std::vector<TuningRow> rows_;
};

// Whether a row is for as many nodes, with as many ranks on each.
bool isForLayout(const TuningRow& row, const plan::Topology& topology);
// Whether it is for this request, algorithm apart.
bool fits(const TuningRow& row, const plan::Topology& topology, const Shape& shape);

// What SMDDP_TUNING_FILE names, read on the first call; throws Usage while that does not succeed.
const Tuning& tuningFromSettings();

}  // namespace smddp::collectives
