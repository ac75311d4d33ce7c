// Sleeping until a mate has something for us, and waking a mate that sleeps.
//
// The sleeper:  prepare(), look once more at everything it waits for, then sleep() or sleepOn(),
//               or cancel() if something was there.
// The waker:    its stores (release), then ring(). A mate that is awake costs a fence and a load.
//
// Between prepare() and the look stands a full fence, and so between the waker's stores and its
// load of the word: one of the two sees the other, and no wake-up is lost. Spurious wake-ups
// happen.
#pragma once

#include <memory>

#include "common/clock.h"
#include "common/file_descriptor.h"
#include "transport/shm/slab.h"

namespace smddp::transport::shm {

// The doorbell of our own process; one per slab. Only one thread at a time sleeps, ringSelf() is
// for any thread. Owns the wake-up pipe.
class Doorbell {
 public:
  explicit Doorbell(std::shared_ptr<Slab> slab) : slab_(std::move(slab)) {}
  ~Doorbell();
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  void prepare();
  void cancel();
  // Returns when rung, or when `timeout` is over. Never longer, so every wait can have a deadline.
  void sleep(Nanoseconds timeout);
  // The same, and also when `descriptor` is readable.
  void sleepOn(int descriptor, Nanoseconds timeout);

  // Makes the pipe that sleepOn() needs, which else does so itself. Throws Resource.
  void openPipe();

  // For other threads of this process.
  void ringSelf();
  // On the thread that owns `mate`. Does nothing when the mate is dead, and leaves a mate in
  // sleepOn() to the end of its time when no descriptor is left to wake it.
  static void ring(Mate& mate);

 private:
  std::shared_ptr<Slab> slab_;
  FileDescriptor readEnd_;
  FileDescriptor writeEnd_;
};

}  // namespace smddp::transport::shm
