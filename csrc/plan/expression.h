// Symbolic values. The checker computes with expressions over the inputs instead of numbers.
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

// An expression and a position in it. Expressions are relative: at position p each leaf means the byte that lies
// p bytes further. A range of bytes with one history therefore holds one expression at consecutive positions.
// Example: with a = input of rank 0 and b = input of rank 1, bytes 64 to 127 of a sum hold (a + b) at positions
// 64 to 127.
struct Term {
  ExpressionId id = kUndefined;
  int64_t position = 0;
  friend bool operator==(const Term&, const Term&) = default;
};

// A range of bytes that holds one expression at consecutive positions.
struct Piece {
  int64_t length = 0;
  Term value;
  friend bool operator==(const Piece&, const Piece&) = default;
};

// An input in an expression: the byte of `rank` that lies `offset` bytes after the expression's position.
struct Leaf {
  Rank rank = 0;
  int64_t offset = 0;
  bool scaled = false;
};

// Owns and interns expressions: equal ids mean the same operations on the same inputs in the same association.
// (a+b)+c, a+(b+c) and the reduction of three operands in one step are three different expressions, because
// 16-bit types round after every step. Used by one thread.
class Expressions {
 public:
  Expressions();

  // The input of a rank in one execution, at position 0.
  ExpressionId input(Rank rank, int execution);
  // A raw input multiplied by the PREMUL_SUM factor.
  ExpressionId scaled(ExpressionId raw);
  // A result after the division of AVG.
  ExpressionId finished(ExpressionId result);
  // The contents of an encoded range: all of these pieces, at position 0.
  ExpressionId encoded(std::span<const Piece> pieces);
  // The pieces that it decodes to: rounded ones. Empty if it is not what an encoded range holds.
  std::vector<Piece> decoded(ExpressionId id);
  // The result of one Reduce step. A single operand is returned unchanged.
  Term reduce(std::span<const Term> operands);

  bool isRaw(ExpressionId id) const { return isRounded(id, Kind::Input); }
  bool isFinished(ExpressionId id) const { return isRounded(id, Kind::Finished); }
  // The execution whose inputs the expression contains; -1 if it contains none, or inputs of several executions.
  int execution(ExpressionId id) const { return nodes_[id].execution; }
  // All inputs, by rank; an input that occurs twice is listed twice.
  const std::vector<Leaf>& leaves(ExpressionId id);
  // Text for messages, such as "(0 + 1) + (2 + 3)", where the numbers are ranks.
  std::string print(ExpressionId id) const;

 private:
  enum class Kind : uint8_t { Undefined, Input, Scaled, Reduced, Finished, Rounded, Encoded };
  struct Node {
    Kind kind = Kind::Undefined;
    Rank rank = 0;
    int execution = -1;
    std::vector<Term> operands;
    std::vector<Leaf> leaves;   // filled when first asked for
    std::vector<Piece> pieces;  // Encoded
  };
  struct Hash {
    size_t operator()(const std::vector<int64_t>& words) const;
  };

  // Whether it is of that kind, or rounded from one that is.
  bool isRounded(ExpressionId id, Kind kind) const;
  ExpressionId intern(Kind kind, Rank rank, int execution, std::span<const Term> operands,
                      std::span<const Piece> pieces = {});

  std::vector<Node> nodes_;
  std::unordered_map<std::vector<int64_t>, ExpressionId, Hash> known_;
};

}  // namespace smddp::plan
