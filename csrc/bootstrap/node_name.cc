#include "bootstrap/node_name.h"

#include <sys/stat.h>

#include <fstream>

#include "bootstrap/process_id.h"
#include "common/error.h"
#include "common/log.h"

namespace smddp::bootstrap {
namespace {

constexpr const char* kChosen = "id:";

// The number that identifies a namespace of this process; 0 if it cannot be read.
uint64_t namespaceInode(const char* path) {
  struct stat info {};
  return ::stat(path, &info) == 0 ? info.st_ino : 0;
}

}  // namespace

std::string nodeName(const Settings& settings) {
  if (!settings.nodeId.empty()) {
    const std::string name = kChosen + settings.nodeId;
    if (name.size() > kMaxNodeNameBytes) {
      raise(ErrorKind::Usage, "SMDDP_NODE_ID has {} characters; use at most {}",
            settings.nodeId.size(), kMaxNodeNameBytes - std::string(kChosen).size());
    }
    return name;
  }
  std::string bootId;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> bootId;
  const uint64_t pids = namespaceInode("/proc/self/ns/pid");
  const uint64_t users = namespaceInode("/proc/self/ns/user");
  if (bootId.empty() || bootId.size() > 64 || pids == 0 || users == 0) {
    SMDDP_LOG(Warn, "bootstrap",
              "/proc does not tell which machine this is, so this rank shares memory with no "
              "other; mount "
              "/proc, or set SMDDP_NODE_ID");
    return "alone:" + toString(randomProcessId());
  }
  return fmt::format("boot:{}/{}/{}", bootId, pids, users);
}

bool isChosenNodeName(const std::string& name) { return name.starts_with(kChosen); }

}  // namespace smddp::bootstrap
