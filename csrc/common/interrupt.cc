#include "common/interrupt.h"

#include <array>
#include <atomic>

namespace smddp {
namespace {

// By user.
std::array<std::atomic<InterruptCheck>, 2> installed{};

}  // namespace

void setInterruptCheck(InterruptCheck check, InterruptUser user) {
  installed.at(static_cast<size_t>(user)).store(check);
}

void checkInterrupt() {
  for (const auto& one : installed) {
    if (const InterruptCheck check = one.load()) check();
  }
}

}  // namespace smddp
