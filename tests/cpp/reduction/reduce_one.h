// Reduces single elements on all SIMD levels.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "reduction/kernel_table.h"

namespace smddp::reduction {

inline std::vector<SimdLevel> availableLevels() {
  std::vector<SimdLevel> levels;
  for (SimdLevel level : {SimdLevel::Scalar, SimdLevel::Avx2, SimdLevel::Avx512})
    if (kernelsOf(level) != nullptr) levels.push_back(level);
  return levels;
}

// One reduction of single elements. The result must be the same on all levels and in every lane: 127 copies of the
// element go through the unrolled loop, the loop of single registers and all parts of the tail.
template <typename T>
T reduceOne(DataType type, std::vector<T> inputs, ReduceOp op, const Scale& scale = {}) {
  constexpr size_t kCopies = 127;
  std::vector<std::vector<T>> sources;
  std::vector<const void*> srcs;
  for (T input : inputs) sources.emplace_back(kCopies, input);
  for (const auto& source : sources) srcs.push_back(source.data());
  std::vector<T> results;
  for (SimdLevel level : availableLevels()) {
    std::array<T, kCopies> result;
    void* dst = result.data();
    reduceWith(*kernelsOf(level), {&dst, 1}, srcs, kCopies, type, op, scale);
    results.insert(results.end(), result.begin(), result.end());
  }
  // One expectation for all: this runs a million times.
  const auto differs = [&](const T& result) {
    return std::memcmp(&result, &results[0], sizeof(T)) != 0;
  };
  EXPECT_TRUE(std::none_of(results.begin(), results.end(), differs)) << "lanes or levels differ";
  return results[0];
}

}  // namespace smddp::reduction
