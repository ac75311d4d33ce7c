// The few words every layer speaks: element types, reduce operations, ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace smddp {

// A rank inside one group. Never a global rank unless the name says so.
using Rank = int32_t;

// Enumerators are spelled as torch spells them, so that logs match what the user typed.
enum class DataType : uint8_t { float32, float64, float16, bfloat16, int32, int64, uint8 };
inline constexpr int kNumDataTypes = 7;

enum class ReduceOp : uint8_t { SUM, AVG, PRODUCT, MIN, MAX, PREMUL_SUM };
inline constexpr int kNumReduceOps = 6;

// Bytes of one element.
constexpr size_t sizeOf(DataType type) {
  switch (type) {
    case DataType::float64:
    case DataType::int64: return 8;
    case DataType::float32:
    case DataType::int32: return 4;
    case DataType::float16:
    case DataType::bfloat16: return 2;
    case DataType::uint8: return 1;
  }
  return 0;
}

constexpr const char* toString(DataType type) {
  switch (type) {
    case DataType::float32: return "float32";
    case DataType::float64: return "float64";
    case DataType::float16: return "float16";
    case DataType::bfloat16: return "bfloat16";
    case DataType::int32: return "int32";
    case DataType::int64: return "int64";
    case DataType::uint8: return "uint8";
  }
  return "?";
}

constexpr const char* toString(ReduceOp op) {
  switch (op) {
    case ReduceOp::SUM: return "SUM";
    case ReduceOp::AVG: return "AVG";
    case ReduceOp::PRODUCT: return "PRODUCT";
    case ReduceOp::MIN: return "MIN";
    case ReduceOp::MAX: return "MAX";
    case ReduceOp::PREMUL_SUM: return "PREMUL_SUM";
  }
  return "?";
}

}  // namespace smddp
