// The control page: the state of a process that its mates read. It lies at the start of the slab.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "transport/shm/segment.h"

namespace smddp::transport::shm {

// A text that is written once and that mates may read at any time. The first write counts; later ones are ignored.
template <size_t kCapacity>
class OnceText {
 public:
  // False if a text was written before. A text beyond the capacity is cut.
  bool write(std::string_view text) {
    if (claimed_.exchange(1, std::memory_order_relaxed) != 0) return false;
    const size_t length = std::min(text.size(), kCapacity);
    text.copy(text_.data(), length);
    // One more than the length, so that an empty text counts as written.
    lengthPlusOne_.store(static_cast<uint32_t>(length) + 1, std::memory_order_release);
    return true;
  }
  bool written() const { return lengthPlusOne_.load(std::memory_order_acquire) != 0; }
  // Empty until written. The length comes from another process, so it is checked.
  std::string read() const {
    const uint32_t length = lengthPlusOne_.load(std::memory_order_acquire);
    if (length == 0) return {};
    return std::string(text_.data(), std::min<size_t>(length - 1, kCapacity));
  }

 private:
  std::atomic<uint32_t> claimed_{0};
  std::atomic<uint32_t> lengthPlusOne_{0};
  std::array<char, kCapacity> text_{};
};

enum class Life : uint32_t { Running, Left, Died };

// The value of the doorbell's sleep word (doorbell.h).
enum class Sleep : uint32_t { Awake = 0, OnFutex = 1, OnPoll = 2 };

// Shared between processes of the same build: magic and version are checked when a mate attaches.
// Only the owner writes, with two exceptions: any mate may change `life` from Running to Died, and clear `sleep`.
struct ProcessPage {
  static constexpr uint64_t kMagic = 0x3164706d6d647364;
  static constexpr uint32_t kVersion = 2;
  static constexpr size_t kMaxCommSegments = 2048;

  explicit ProcessPage(const Nonce& slabNonce);

  uint64_t magic = kMagic;
  uint32_t version = kVersion;
  int32_t pid;
  uint64_t startTime;  // of the process, as in /proc/<pid>/stat; 0 if it cannot be read
  Nonce nonce;

  // One thread holds it for the life of the process (liveness.h). Mates only read its futex word.
  alignas(64) pthread_mutex_t lifeLock;
  std::atomic<uint32_t> lifeLockHeld{0};
  std::atomic<Life> life{Life::Running};

  alignas(64) std::atomic<Sleep> sleep{Sleep::Awake};
  std::atomic<int32_t> pipeDescriptor{-1};  // write end of the owner's wake-up pipe
  std::atomic<uint64_t> pipeInode{
      0};  // the pipe's inode: tells if the descriptor's number was reused

  // The core on which its engine ran last: a hint for mates that share this core (engine/process/core_placement.h).
  std::atomic<int32_t> core{-1};

  // ShmTransport: the place of its rings in the slab, and the number of the incarnation that reads them. The number is
  // odd while there is one.
  alignas(64) std::atomic<uint64_t> ringsOffset{0};
  std::atomic<uint32_t> ringsGeneration{0};

  OnceText<1024> firstError;
  OnceText<240> farewell;

  // The segments of communication memory that the owner has: a tag from the nonce, or 0 for none.
  std::array<std::atomic<uint64_t>, kMaxCommSegments> commSegments{};

  // Changes Running to Left, with a reason that mates quote. Owner only, on any thread. The first call counts.
  void leave(std::string_view reason);
};

// Reads /proc/<pid>/stat. All fields are zero if there is no such process or it is a zombie. nullopt if the file cannot
// be read now (no free descriptor, no /proc).
struct ProcessStat {
  uint64_t startTime = 0;  // clock ticks since boot
  bool stopped = false;    // by a signal or a debugger
};
std::optional<ProcessStat> statOf(int32_t pid);

// The startTime of statOf().
std::optional<uint64_t> startTimeOf(int32_t pid);

}  // namespace smddp::transport::shm
