// The numbers that were added last. What is remembered of things that have ended, so that it does not grow for ever.
//
// Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_set>

namespace smddp {

class RecentSet {
 public:
  explicit RecentSet(size_t limit) : limit_(limit) {}

  // False if it is in the set already. Beyond the limit, the number that was added first is forgotten.
  bool insert(uint64_t number) {
    if (!numbers_.insert(number).second) return false;
    order_.push_back(number);
    if (order_.size() > limit_) {
      numbers_.erase(order_.front());
      order_.pop_front();
    }
    return true;
  }
  bool contains(uint64_t number) const { return numbers_.contains(number); }

 private:
  const size_t limit_;
  std::unordered_set<uint64_t> numbers_;
  std::deque<uint64_t> order_;  // oldest first
};

}  // namespace smddp
