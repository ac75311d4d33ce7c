// Notes between processes, of any length, in parts that fit into control messages. Parts may come in any order. They
// come from other processes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace smddp::bootstrap {

struct Note {
  uint32_t topic = 0;
  std::vector<std::byte> bytes{};
};

// The parts of a note, of at most `partBytes` each. `number`: of the note, among those of its sender. Throws Internal
// if the note is empty or too long.
std::vector<std::vector<std::byte>> partsOf(uint32_t topic, uint32_t number,
                                            std::span<const std::byte> bytes, size_t partBytes);

// Puts notes together again.
class NoteParts {
 public:
  // Returns the note of which this was the last part. Ignores what is no part. `sender`: the process.
  std::optional<Note> add(const void* sender, std::span<const std::byte> part);

 private:
  struct Incomplete {
    size_t missing;
    std::vector<std::vector<std::byte>> parts;
  };
  std::map<std::pair<const void*, uint32_t>, Incomplete> incomplete_;
};

}  // namespace smddp::bootstrap
