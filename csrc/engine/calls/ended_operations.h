// Keeps what operations leave behind when they end: completions, their continuations, and memory.
//
// Finishes the completions, and collects the rest until the engine's owner has let go (Leftovers). Memory of an
// operation that failed stays here for as long as the group lives. Used by the thread that owns the engine.
#pragma once

#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/calls/completion.h"

namespace smddp::engine::calls {

// The work that a thread may do only when it does not own the engine: to run continuations, and to free memory of
// operations. A continuation runs the user's code. To free a tensor may take Python's interpreter lock, and a thread
// that holds that lock may wait for the engine.
struct Leftovers {
  std::vector<std::function<void()>> continuations;
  std::vector<std::shared_ptr<void>> memory;

  // Moves all of `from` to the end of this.
  void take(Leftovers& from) {
    const auto move = [](auto& source, auto& target) {
      target.insert(target.end(), std::move_iterator(source.begin()),
                    std::move_iterator(source.end()));
      source.clear();
    };
    if (!from.continuations.empty()) move(from.continuations, continuations);
    if (!from.memory.empty()) move(from.memory, memory);
  }
};

class EndedOperations {
 public:
  void complete(Completion& completion, std::optional<Error> error) {
    for (auto& action : completion.complete(std::move(error))) add(std::move(action));
  }
  void add(std::function<void()> continuation) {
    leftovers_.continuations.push_back(std::move(continuation));
  }
  // Memory that nobody needs any more.
  void release(std::shared_ptr<void> memory) {
    if (memory) leftovers_.memory.push_back(std::move(memory));
  }
  // Memory of an operation that failed: the network may read it for as long as the group lives.
  void keep(std::shared_ptr<void> memory) {
    if (memory) kept_.push_back(std::move(memory));
  }
  // The group has ended.
  void releaseKept() {
    for (auto& memory : std::exchange(kept_, {})) release(std::move(memory));
  }
  // Appends what has come since the last call.
  void moveTo(Leftovers& leftovers) { leftovers.take(leftovers_); }

 private:
  Leftovers leftovers_;
  std::vector<std::shared_ptr<void>> kept_;
};

}  // namespace smddp::engine::calls
