// Who is still there. The kernel marks a robust mutex when its holder dies, before it takes the
// process apart: mates see a death in about 0.1 ms, whatever the size of the process and whoever
// its parent is.
#pragma once

#include <memory>
#include <string>

#include "transport/shm/slab.h"

namespace smddp::transport::shm {

// Holds our lifeline. Construct and destroy it on one thread, which should live as long as the
// process: the engine's progress thread. While nobody holds it, mates fall back to looking at
// /proc, which is slower. The end of the thread without the destructor counts as the death of the
// process.
class Lifeline {
 public:
  // Throws Internal when the slab's lifeline is held already.
  explicit Lifeline(std::shared_ptr<Slab> slab);
  ~Lifeline();
  Lifeline(const Lifeline&) = delete;
  Lifeline& operator=(const Lifeline&) = delete;

 private:
  std::shared_ptr<Slab> slab_;
};

// Two loads while the mate is running and holds its lifeline; /proc is read at most every 10 ms
// (lifeline not held) or every second (in case the kernel lacks robust lists). Publishes a death
// for all other mates.
Life lifeOf(Mate& mate);

// Whether a signal or a debugger has stopped the mate's process. Reads /proc.
bool isStopped(const Mate& mate);

// "it left: …", "its process died": for error texts that name the mate before.
std::string describeLife(const Mate& mate);

}  // namespace smddp::transport::shm
