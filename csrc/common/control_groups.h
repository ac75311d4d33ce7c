// Limits of the machine and of this process's control groups (cgroups(7), versions 1 and 2).
//
// A group may lie in others, and the limits of all of them count: Slurm limits a job, and none of its tasks. In a
// container the path that the kernel names may be known to the host only; then the folders around it that exist count.
//
// Functions without state. Any thread. What cannot be read is left out.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace smddp {

class ControlGroups {
 public:
  // For tests: other places.
  explicit ControlGroups(std::filesystem::path own = "/proc/self/cgroup",
                         std::filesystem::path groups = "/sys/fs/cgroup")
      : own_(std::move(own)), groups_(std::move(groups)) {}

  // The folders of this process's groups, its own first. `controller`: of version 1, which has groups for each; ""
  // means version 2.
  std::vector<std::filesystem::path> folders(const std::string& controller) const;
  // The bytes that may still be used: the least that the machine and any group have left. Memory that the kernel gives
  // up when it is needed, such as that of files that were read, counts as left.
  std::optional<uint64_t> availableMemory() const;
  // How many threads and processes may still be started; nullopt without a limit.
  std::optional<uint64_t> availableThreads() const;

 private:
  std::filesystem::path own_, groups_;
};

}  // namespace smddp
