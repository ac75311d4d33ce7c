#include "process_group/hooks.h"

#include "common/log.h"

namespace smddp::process_group {

void Hooks::runAbort() const {
  try {
    abort.run();
  } catch (const std::exception& error) {
    SMDDP_LOG(Warn, "process_group", "a hook for failures has failed itself: {}", error.what());
  }
}

}  // namespace smddp::process_group
