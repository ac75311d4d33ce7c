// Remembers how long the last executions of a plan took.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include "common/clock.h"

namespace smddp::engine::observe {

class RecentDurations {
 public:
  void add(Nanoseconds duration) { last_[count_++ % last_.size()] = duration; }
  // 0 before the first.
  Nanoseconds median() const {
    const size_t known = std::min(count_, last_.size());
    if (known == 0) return 0;
    auto sorted = last_;
    std::nth_element(sorted.begin(), sorted.begin() + known / 2, sorted.begin() + known);
    return sorted[known / 2];
  }

 private:
  std::array<Nanoseconds, 9> last_{};
  size_t count_ = 0;
};

}  // namespace smddp::engine::observe
