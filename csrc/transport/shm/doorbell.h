// The doorbell: to sleep until a mate has something for us, and to wake a mate that sleeps.
//
// The sleeper calls prepare(), checks once more everything that it waits for, and then calls sleep() or sleepOn(),
// or cancel() if something has happened.
// The waker stores its data (release), then calls ring(). If the mate is awake, that costs a fence and a load.
//
// There is a full fence between the sleeper's prepare() and its check, and one between the waker's stores and its
// load of the sleep word. So at least one of the two sees the other's store, and no wake-up is lost. Spurious wake-ups
// happen.
#pragma once

#include <memory>

#include "common/clock.h"
#include "common/file_descriptor.h"
#include "transport/shm/slab.h"

namespace smddp::transport::shm {

// The doorbell of our own process; one per slab. Owns the wake-up pipe. Only one thread at a time may sleep; any thread
// may call ringSelf().
class Doorbell {
 public:
  explicit Doorbell(std::shared_ptr<Slab> slab) : slab_(std::move(slab)) {}
  ~Doorbell();
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  void prepare();
  void cancel();
  // Sleeps until rung, but at most for `timeout`, so that every wait can have a deadline.
  void sleep(Nanoseconds timeout);
  // Sleeps until rung or until `descriptor` is readable, but at most for `timeout`.
  void sleepOn(int descriptor, Nanoseconds timeout);

  // Makes the pipe for sleepOn(), which otherwise makes it on the first call. Throws Resource.
  void openPipe();

  // For other threads of this process.
  void ringSelf();
  // Called on the thread that owns `mate`. Does nothing if the mate is dead. If this process has no descriptor left to
  // wake a mate in sleepOn(), the mate sleeps until its timeout.
  static void ring(Mate& mate);

 private:
  std::shared_ptr<Slab> slab_;
  FileDescriptor readEnd_;
  FileDescriptor writeEnd_;
};

}  // namespace smddp::transport::shm
