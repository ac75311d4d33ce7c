#include "plan/expression.h"

#include <algorithm>

#include <fmt/format.h>

namespace smddp::plan {

size_t Expressions::Hash::operator()(const std::vector<int64_t>& words) const {
  uint64_t hash = 0x9e3779b97f4a7c15;
  for (const int64_t word : words) {
    hash = (hash ^ static_cast<uint64_t>(word)) * 0xff51afd7ed558ccd;
    hash ^= hash >> 32;
  }
  return hash;
}

Expressions::Expressions() { nodes_.emplace_back(); }

bool Expressions::isRounded(ExpressionId id, Kind kind) const {
  while (nodes_[id].kind == Kind::Rounded) id = nodes_[id].operands.front().id;
  return nodes_[id].kind == kind;
}

ExpressionId Expressions::intern(Kind kind, Rank rank, int execution,
                                 std::span<const Term> operands, std::span<const Piece> pieces) {
  std::vector<int64_t> key{static_cast<int64_t>(kind), rank, execution};
  for (const Term& operand : operands) {
    key.push_back(operand.id);
    key.push_back(operand.position);
  }
  for (const Piece& piece : pieces) {
    key.push_back(piece.length);
    key.push_back(piece.value.id);
    key.push_back(piece.value.position);
  }
  const auto next = static_cast<ExpressionId>(nodes_.size());
  const auto [it, isNew] = known_.try_emplace(std::move(key), next);
  if (isNew) {
    nodes_.push_back({kind,
                      rank,
                      execution,
                      {operands.begin(), operands.end()},
                      {},
                      {pieces.begin(), pieces.end()}});
  }
  return it->second;
}

ExpressionId Expressions::input(Rank rank, int execution) {
  return intern(Kind::Input, rank, execution, {});
}

ExpressionId Expressions::scaled(ExpressionId raw) {
  const Term operand{raw, 0};
  return intern(Kind::Scaled, nodes_[raw].rank, nodes_[raw].execution, {&operand, 1});
}

ExpressionId Expressions::finished(ExpressionId result) {
  const Term operand{result, 0};
  return intern(Kind::Finished, 0, nodes_[result].execution, {&operand, 1});
}

ExpressionId Expressions::encoded(std::span<const Piece> pieces) {
  int execution = nodes_[pieces.front().value.id].execution;
  for (const Piece& piece : pieces) {
    if (piece.value.id == kUndefined) return kUndefined;
    if (nodes_[piece.value.id].execution != execution) execution = -1;
  }
  return intern(Kind::Encoded, 0, execution, {}, pieces);
}

std::vector<Piece> Expressions::decoded(ExpressionId id) {
  std::vector<Piece> pieces = nodes_[id].pieces;
  for (Piece& piece : pieces) {
    const Term operand{piece.value.id, 0};
    piece.value.id = intern(Kind::Rounded, 0, nodes_[piece.value.id].execution, {&operand, 1});
  }
  return pieces;
}

Term Expressions::reduce(std::span<const Term> operands) {
  if (operands.size() == 1) return operands.front();
  const int64_t position = operands.front().position;
  int execution = nodes_[operands.front().id].execution;
  std::vector<Term> relative(operands.begin(), operands.end());
  for (Term& operand : relative) {
    if (operand.id == kUndefined) return {};
    if (nodes_[operand.id].execution != execution) execution = -1;
    operand.position -= position;
  }
  return {intern(Kind::Reduced, 0, execution, relative), position};
}

const std::vector<Leaf>& Expressions::leaves(ExpressionId id) {
  Node& node = nodes_[id];
  if (!node.leaves.empty() || node.kind == Kind::Undefined) return node.leaves;
  std::vector<Leaf> all;
  if (node.kind == Kind::Input) all.push_back({node.rank, 0, false});
  for (const Term& operand : node.operands) {
    for (Leaf leaf : leaves(operand.id)) {
      leaf.offset += operand.position;
      leaf.scaled |= node.kind == Kind::Scaled;
      all.push_back(leaf);
    }
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const Leaf& a, const Leaf& b) { return a.rank < b.rank; });
  return node.leaves = std::move(all);
}

std::string Expressions::print(ExpressionId id) const {
  const Node& node = nodes_[id];
  switch (node.kind) {
    case Kind::Undefined: return "nothing";
    case Kind::Input: return fmt::format("{}", node.rank);
    case Kind::Scaled: return fmt::format("{}'", node.rank);
    case Kind::Finished: return print(node.operands.front().id);
    case Kind::Rounded: return fmt::format("~({})", print(node.operands.front().id));
    case Kind::Encoded: return fmt::format("{} encoded pieces", node.pieces.size());
    case Kind::Reduced: break;
  }
  std::string text;
  for (const Term& operand : node.operands) {
    const bool nested = nodes_[operand.id].kind == Kind::Reduced;
    text += fmt::format(fmt::runtime(nested ? "{}({})" : "{}{}"), text.empty() ? "" : " + ",
                        print(operand.id));
    if (operand.position != 0) text += fmt::format("@{:+}", operand.position);
  }
  return text;
}

}  // namespace smddp::plan
