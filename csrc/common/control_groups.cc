#include "common/control_groups.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <limits>
#include <sstream>
#include <string_view>

namespace smddp {
namespace {

namespace fs = std::filesystem;

// The number that a file holds; nullopt if there is none, such as "max".
std::optional<int64_t> numberIn(const fs::path& file) {
  std::ifstream stream(file);
  int64_t number = 0;
  if (stream >> number) return number;
  return std::nullopt;
}

std::optional<uint64_t> least(std::optional<uint64_t> a, std::optional<int64_t> b) {
  if (!b) return a;
  const auto other = static_cast<uint64_t>(std::max<int64_t>(*b, 0));
  return a ? std::min(*a, other) : other;
}

// Returns how much of a limit is left; nullopt where the folder has none.
std::optional<int64_t> leftOf(const fs::path& folder, const char* most, const char* now) {
  const auto limit = numberIn(folder / most), used = numberIn(folder / now);
  if (!limit || !used) return std::nullopt;
  return *limit - *used;
}

// The sum of those lines of memory.stat that count memory which the kernel gives up.
int64_t reclaimable(const fs::path& folder, const std::string& prefix) {
  constexpr std::array<std::string_view, 3> kNames = {"active_file", "inactive_file",
                                                      "slab_reclaimable"};
  std::ifstream stream(folder / "memory.stat");
  std::string name;
  int64_t bytes = 0, sum = 0;
  while (stream >> name >> bytes) {
    const auto is = [&](std::string_view one) { return name == prefix + std::string(one); };
    if (std::any_of(kNames.begin(), kNames.end(), is)) sum += bytes;
  }
  return sum;
}

std::optional<uint64_t> availableOnMachine() {
  std::ifstream stream("/proc/meminfo");
  std::string line;
  while (std::getline(stream, line)) {
    constexpr std::string_view kName = "MemAvailable:";
    if (!line.starts_with(kName)) continue;
    uint64_t kib = 0;
    if (std::istringstream(line.substr(kName.size())) >> kib) return kib * 1024;
  }
  return std::nullopt;
}

}  // namespace

// A line of /proc/self/cgroup: "0::/job/task" of version 2, "4:cpu,cpuacct:/docker/abc" of version 1.
std::vector<fs::path> ControlGroups::folders(const std::string& controller) const {
  std::ifstream stream(own_);
  std::string line;
  while (std::getline(stream, line)) {
    const auto first = line.find(':');
    const auto second = first == line.npos ? line.npos : line.find(':', first + 1);
    if (second == line.npos) continue;
    std::istringstream controllers(line.substr(first + 1, second - first - 1) + ",");
    bool found = false;
    for (std::string one; std::getline(controllers, one, ',');) found |= one == controller;
    if (!found) continue;
    // Where a machine has both versions, the second has a folder of its own.
    std::vector<fs::path> roots{groups_ / controller};
    if (controller.empty()) roots.push_back(groups_ / "unified");
    std::vector<fs::path> all;
    for (const fs::path& root : roots) {
      fs::path path = fs::path(line.substr(second + 1)).relative_path();
      while (true) {
        all.push_back(path.empty() ? root : root / path);
        if (path.empty()) break;
        path = path.parent_path();
      }
    }
    return all;
  }
  return {};
}

std::optional<uint64_t> ControlGroups::availableMemory() const {
  auto available = availableOnMachine();
  for (const fs::path& folder : folders("")) {
    if (const auto left = leftOf(folder, "memory.max", "memory.current")) {
      available = least(available, *left + reclaimable(folder, ""));
    }
  }
  for (const fs::path& folder : folders("memory")) {
    // Without a limit it is nearly the largest number there is.
    const auto left = leftOf(folder, "memory.limit_in_bytes", "memory.usage_in_bytes");
    if (left && *left < std::numeric_limits<int64_t>::max() / 2) {
      available = least(available, *left + reclaimable(folder, "total_"));
    }
  }
  return available;
}

std::optional<uint64_t> ControlGroups::availableThreads() const {
  std::optional<uint64_t> available;
  for (const char* controller : {"", "pids"}) {
    for (const fs::path& folder : folders(controller)) {
      available = least(available, leftOf(folder, "pids.max", "pids.current"));
    }
  }
  return available;
}

}  // namespace smddp
