#include "common/interrupt.h"

#include <atomic>

namespace smddp {
namespace {

std::atomic<InterruptCheck> installed{nullptr};

}  // namespace

void setInterruptCheck(InterruptCheck check) { installed.store(check); }

void checkInterrupt() {
  if (const InterruptCheck check = installed.load()) check();
}

}  // namespace smddp
