// What bytes hold, as expressions over the inputs: the checker computes with these instead of numbers.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/types.h"

namespace smddp::plan {

using ExpressionId = uint32_t;
inline constexpr ExpressionId kUndefined = 0;

// Expressions do not mention where they stand: an expression at position p means that its leaves lie p bytes
// further. A run of bytes therefore holds one expression at consecutive positions.
struct Term {
  ExpressionId id = kUndefined;
  int64_t position = 0;
  friend bool operator==(const Term&, const Term&) = default;
};

// An input that an expression contains: `rank`'s, `offset` bytes beyond the expression's position.
struct Leaf {
  Rank rank = 0;
  int64_t offset = 0;
  bool scaled = false;
};

// Owns and interns expressions: equal ids mean the same operations on the same inputs in the same association.
// (a+b)+c and a+(b+c) differ, and so does a three-operand reduction, because half types round between them.
class Expressions {
 public:
  Expressions();

  // The input of a rank in one execution, at position 0.
  ExpressionId input(Rank rank, int execution);
  // A raw input multiplied by the PREMUL_SUM factor.
  ExpressionId scaled(ExpressionId raw);
  // A result after the division of AVG.
  ExpressionId finished(ExpressionId result);
  // One Reduce step; a single operand stays what it is.
  Term reduce(std::span<const Term> operands);

  bool isRaw(ExpressionId id) const { return nodes_[id].kind == Kind::Input; }
  bool isFinished(ExpressionId id) const { return nodes_[id].kind == Kind::Finished; }
  // The execution whose inputs it contains; -1 when there is none, or several.
  int execution(ExpressionId id) const { return nodes_[id].execution; }
  // All inputs, by rank; an input that occurs twice is listed twice.
  const std::vector<Leaf>& leaves(ExpressionId id);
  // For messages: "(0 + 1) + (2 + 3)", the numbers being ranks.
  std::string print(ExpressionId id) const;

 private:
  enum class Kind : uint8_t { Undefined, Input, Scaled, Reduced, Finished };
  struct Node {
    Kind kind = Kind::Undefined;
    Rank rank = 0;
    int execution = -1;
    std::vector<Term> operands;
    std::vector<Leaf> leaves;  // filled when first asked for
  };
  struct Hash {
    size_t operator()(const std::vector<int64_t>& words) const;
  };

  ExpressionId intern(Kind kind, Rank rank, int execution, std::span<const Term> operands);

  std::vector<Node> nodes_;
  std::unordered_map<std::vector<int64_t>, ExpressionId, Hash> known_;
};

}  // namespace smddp::plan
