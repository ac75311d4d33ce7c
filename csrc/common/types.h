// The types of every layer: element types, reduce operations, ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace smddp {

// A rank within one group. It is a global rank only where the name says so.
using Rank = int32_t;

// Spelled as in torch, so that logs match what the user typed (but `bool` is a keyword of C++). Fingerprints contain
// them, as one byte each.
enum class DataType : uint8_t {
  float32,
  float64,
  float16,
  bfloat16,
  complex64,
  complex128,
  int8,
  int16,
  int32,
  int64,
  uint8,
  uint16,
  uint32,
  uint64,
  boolean,
};
inline constexpr int kNumDataTypes = 15;

enum class ReduceOp : uint8_t { SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM };
inline constexpr int kNumReduceOps = 9;

// How vectors of float32 travel between nodes (reduction/encoded.h).
enum class Wire : uint8_t { fp32, bf16, int8 };
inline constexpr int kNumWires = 3;

// Bytes of one element.
constexpr size_t sizeOf(DataType type) {
  switch (type) {
    case DataType::complex128: return 16;
    case DataType::float64:
    case DataType::complex64:
    case DataType::int64:
    case DataType::uint64: return 8;
    case DataType::float32:
    case DataType::int32:
    case DataType::uint32: return 4;
    case DataType::float16:
    case DataType::bfloat16:
    case DataType::int16:
    case DataType::uint16: return 2;
    case DataType::int8:
    case DataType::uint8:
    case DataType::boolean: return 1;
  }
  return 0;
}

constexpr const char* toString(DataType type) {
  switch (type) {
    case DataType::float32: return "float32";
    case DataType::float64: return "float64";
    case DataType::float16: return "float16";
    case DataType::bfloat16: return "bfloat16";
    case DataType::complex64: return "complex64";
    case DataType::complex128: return "complex128";
    case DataType::int8: return "int8";
    case DataType::int16: return "int16";
    case DataType::int32: return "int32";
    case DataType::int64: return "int64";
    case DataType::uint8: return "uint8";
    case DataType::uint16: return "uint16";
    case DataType::uint32: return "uint32";
    case DataType::uint64: return "uint64";
    case DataType::boolean: return "bool";
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
    case ReduceOp::BAND: return "BAND";
    case ReduceOp::BOR: return "BOR";
    case ReduceOp::BXOR: return "BXOR";
    case ReduceOp::PREMUL_SUM: return "PREMUL_SUM";
  }
  return "?";
}

constexpr const char* toString(Wire wire) {
  switch (wire) {
    case Wire::fp32: return "fp32";
    case Wire::bf16: return "bf16";
    case Wire::int8: return "int8";
  }
  return "?";
}

}  // namespace smddp
