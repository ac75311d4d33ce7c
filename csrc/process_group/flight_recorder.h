// Writes the file of torch's Flight Recorder when a group fails (FlightRecorderHook.hpp). Torch writes it with the
// stack of each call, which takes Python's interpreter lock and, the first time, the import of a large part of torch.
#pragma once

namespace smddp::process_group {

// Both do something once per process, and only if torch would write a file.
//
// Writes the file without stacks, which takes milliseconds, since the process may soon be killed; the next one replaces
// it. From the first call on the file is always whole, whoever writes it: it gets its name when it is complete.
void dumpWithoutStacks();
// Writes the file with stacks, if torch's hook has not: it is gone when the group has been destroyed meanwhile.
void dumpWithStacks();

}  // namespace smddp::process_group
