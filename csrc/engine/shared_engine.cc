#include "engine/shared_engine.h"

#include <utility>

#include "common/mutex.h"

namespace smddp::engine {
namespace {

struct Slot {
  Mutex mutex;
  std::shared_ptr<Engine> engine SMDDP_GUARDED_BY(mutex);
};
// Never destroyed, see sharedEngine().
Slot& slot() {
  static auto* instance = new Slot;
  return *instance;
}

}  // namespace

std::shared_ptr<Engine> sharedEngine(const Settings& settings) {
  Slot& shared = slot();
  const MutexLock lock(shared.mutex);
  if (shared.engine && shared.engine->isReplaceableInChild()) {
    // Never destroyed: its threads and connections are the parent's.
    static_cast<void>(new std::shared_ptr<Engine>(std::move(shared.engine)));
    shared.engine.reset();
  }
  if (!shared.engine) {
    Engine::Options options;
    options.process.settings = settings;
    shared.engine = std::make_shared<Engine>(options);
  }
  return shared.engine;
}

void shutdownSharedEngine() {
  std::shared_ptr<Engine> engine;
  {
    Slot& shared = slot();
    const MutexLock lock(shared.mutex);
    engine = shared.engine;
  }
  // The lock is not held here, because continuations that run now may ask for the engine, too.
  if (engine) engine->shutdown();
}

}  // namespace smddp::engine
