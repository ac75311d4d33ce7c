// Detects which mates are alive. The kernel marks a robust mutex when the thread that holds it dies, before it frees
// the memory of the process. So mates see a death after about 0.1 ms, whatever the size of the process.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "transport/shm/slab.h"

namespace smddp::transport::shm {

// Holds our life lock. Construct and destroy it on one thread that lives as long as the process: the engine's
// progress thread. While no thread holds the mutex, mates look at /proc instead, which is slower. If the thread ends
// without the destructor, mates take the process for dead.
class LifeLock {
 public:
  // Throws Internal if the slab's life lock is held already.
  explicit LifeLock(std::shared_ptr<Slab> slab);
  ~LifeLock();
  LifeLock(const LifeLock&) = delete;
  LifeLock& operator=(const LifeLock&) = delete;

 private:
  std::shared_ptr<Slab> slab_;
};

// The state of a mate. It costs two loads while the mate is running and holds its life lock. It reads /proc at most
// every 10 ms if the life lock is not held, and every second otherwise (the kernel may lack robust lists). Publishes a
// death to all other mates.
Life lifeOf(Mate& mate);

// True if a signal or a debugger has stopped the mate's process. Reads /proc.
bool isStopped(const Mate& mate);
// Whether a freezer of cgroups holds a process still, as `docker pause` does: such a process looks as if it slept.
bool isFrozen(int32_t pid);
// The files that say so, and the text in them, for what /proc/<pid>/cgroup contains; below /sys/fs/cgroup.
struct FreezerFile {
  std::string path;
  std::string_view frozen;
};
std::vector<FreezerFile> freezerFiles(std::string_view cgroups);

// "it left: …", "its process died": for error texts that have named the mate.
std::string describeLife(const Mate& mate);

}  // namespace smddp::transport::shm
