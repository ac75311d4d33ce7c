// How a thread that waits hears of signals. A program that handles signals between its own instructions, as Python
// does, installs a function; every wait calls it at least every 100 ms.
//
// Threads: any. The function is called without locks and without ownership of the engine, on the thread that waits. It
// may run any code, and ends the wait by an exception of any type, which passes through the wait.
#pragma once

namespace smddp {

using InterruptCheck = void (*)();

// The two users that install a function. Each has one, because both may be used in one process.
enum class InterruptUser { Bindings, CInterface };

// Null: it does not interrupt waits.
void setInterruptCheck(InterruptCheck check, InterruptUser user = InterruptUser::Bindings);
// Throws what the installed functions throw.
void checkInterrupt();

}  // namespace smddp
