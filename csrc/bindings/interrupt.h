// Python's signals end waits: Ctrl-C is KeyboardInterrupt (common/interrupt.h).
#pragma once

namespace smddp::bindings {

void installInterruptCheck();

}  // namespace smddp::bindings
