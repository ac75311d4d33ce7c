// What operations that ended leave behind: completions, their continuations, and memory that must outlive a failure.
//
// Finishes the completions, and collects their continuations until the engine can run them: they are the user's code,
// so they must not run while a thread owns the engine. Used by the thread that owns the engine.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/completion.h"

namespace smddp::engine {

class EndedOperations {
 public:
  void finish(Completion& completion, std::optional<Error> error) {
    for (auto& action : completion.finish(std::move(error))) add(std::move(action));
  }
  void add(std::function<void()> continuation) {
    continuations_.push_back(std::move(continuation));
  }
  // Keeps memory of an operation that failed: the network may read it for as long as the group lives.
  void keep(std::shared_ptr<void> memory) {
    if (memory) kept_.push_back(std::move(memory));
  }
  // The continuations since the last call.
  std::vector<std::function<void()>> take() { return std::exchange(continuations_, {}); }

 private:
  std::vector<std::function<void()>> continuations_;
  std::vector<std::shared_ptr<void>> kept_;
};

}  // namespace smddp::engine
