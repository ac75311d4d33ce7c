// The numbers that were added last, each with a value or without: what is remembered of things that have ended, so that
// it does not grow for ever.
//
// Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <utility>

namespace smddp {

template <typename Value>
class RecentMap {
 public:
  explicit RecentMap(size_t limit) : limit_(limit) {}

  // False if the number is there already. Beyond the limit, the number that was added first is forgotten.
  bool insert(uint64_t number, Value value) {
    if (!values_.emplace(number, std::move(value)).second) return false;
    order_.push_back(number);
    if (order_.size() > limit_) {
      values_.erase(order_.front());
      order_.pop_front();
    }
    return true;
  }
  // The number's value; null if it is not there.
  const Value* find(uint64_t number) const {
    const auto found = values_.find(number);
    return found == values_.end() ? nullptr : &found->second;
  }

 private:
  const size_t limit_;
  std::unordered_map<uint64_t, Value> values_;
  std::deque<uint64_t> order_;  // oldest first
};

class RecentSet {
 public:
  explicit RecentSet(size_t limit) : numbers_(limit) {}
  // As RecentMap::insert().
  bool insert(uint64_t number) { return numbers_.insert(number, {}); }
  bool contains(uint64_t number) const { return numbers_.find(number) != nullptr; }

 private:
  struct Nothing {};
  RecentMap<Nothing> numbers_;
};

}  // namespace smddp
