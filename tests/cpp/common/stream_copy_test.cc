#include "common/stream_copy.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace smddp {
namespace {

// Compares with memcpy for every offset of source and target in a cache line, and lengths from zero to several lines.
// The bytes around the target must not change.
TEST(StreamCopy, CopiesWhatMemcpyCopies) {
  constexpr size_t kRoom = 1024;
  std::vector<char> source(kRoom);
  for (size_t i = 0; i < kRoom; ++i) source[i] = static_cast<char>(i * 37 + i / 256);
  for (size_t to = 0; to < 64; to += 3) {
    for (size_t from = 0; from < 64; from += 5) {
      for (size_t bytes = 0; bytes < 400; bytes += bytes < 140 ? 1 : 29) {
        std::vector<char> expected(kRoom, 'x');
        std::vector<char> copied(kRoom, 'x');
        std::memcpy(expected.data() + to, source.data() + from, bytes);
        streamCopy(copied.data() + to, source.data() + from, bytes);
        ASSERT_EQ(copied, expected) << bytes << " bytes from +" << from << " to +" << to;
      }
    }
  }
}

}  // namespace
}  // namespace smddp
