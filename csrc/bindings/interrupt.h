// Python's signals end waits: Ctrl-C is KeyboardInterrupt (common/interrupt.h).
#pragma once

namespace smddp::bindings {

void installInterruptCheck();
// Raises SystemExit in Python code that threads of this name run: it ends there, before the interpreter does, which
// would end such a thread in the middle of torch's code. Holds the GIL.
void endPythonOf(const char* threadName);

}  // namespace smddp::bindings
