// The control page: what every mate on the node may know about a process. It lies at the start of
// its slab.
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

// Text that its owner writes once and mates read at any time. The first writer wins; a later one is
// ignored.
template <size_t kCapacity>
class OnceText {
 public:
  // False when something was written before. Text beyond the capacity is cut.
  bool write(std::string_view text) {
    if (claimed_.exchange(1, std::memory_order_relaxed) != 0) return false;
    const size_t length = std::min(text.size(), kCapacity);
    text.copy(text_.data(), length);
    // One more than the length, so that an empty text counts as written.
    lengthPlusOne_.store(static_cast<uint32_t>(length) + 1, std::memory_order_release);
    return true;
  }
  bool written() const { return lengthPlusOne_.load(std::memory_order_acquire) != 0; }
  // Empty until written. The length comes from another process and is not trusted.
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

// What the doorbell word says about its process (doorbell.h).
enum class Sleep : uint32_t { Awake = 0, OnFutex = 1, OnPoll = 2 };

// Shared between processes of the same build: magic and version are checked when a mate attaches.
// Every field has one writer, the owner, except `life` (anyone may move Running to Died) and
// `sleep` (anyone may clear it).
struct ProcessPage {
  static constexpr uint64_t kMagic = 0x3164706d6d647364;
  static constexpr uint32_t kVersion = 2;
  static constexpr size_t kMaxCommSegments = 2048;

  explicit ProcessPage(const Nonce& slabNonce);

  uint64_t magic = kMagic;
  uint32_t version = kVersion;
  int32_t pid;
  uint64_t startTime;  // of the process, as in /proc/<pid>/stat; 0 when it cannot be read
  Nonce nonce;

  // Held by one thread for the life of the process (liveness.h). Mates only ever look at its futex
  // word.
  alignas(64) pthread_mutex_t lifeline;
  std::atomic<uint32_t> lifelineHeld{0};
  std::atomic<Life> life{Life::Running};

  alignas(64) std::atomic<Sleep> sleep{Sleep::Awake};
  std::atomic<int32_t> pipeDescriptor{-1};  // write end of the owner's wake-up pipe
  std::atomic<uint64_t> pipeInode{0};  // what that descriptor must be, lest its number was reused

  // Where its engine ran last, a hint for mates that share a core with it (engine/core_sharing.h).
  std::atomic<int32_t> core{-1};

  // ShmTransport: where its rings lie in the slab, and which incarnation reads them (odd while
  // there is one).
  alignas(64) std::atomic<uint64_t> ringsOffset{0};
  std::atomic<uint32_t> ringsGeneration{0};

  OnceText<1024> firstError;
  OnceText<240> farewell;

  // Communication memory that is still mapped by the owner: first half of its nonce, 0 when gone.
  std::array<std::atomic<uint64_t>, kMaxCommSegments> commSegments{};

  // Moves Running to Left, with the reason that mates will quote. Owner only; any thread; the first
  // call counts.
  void leave(std::string_view reason);
};

// What /proc/<pid>/stat says. All zero when there is no such process or it is a zombie; nothing when
// that cannot be learnt now (no descriptor free, no /proc).
struct ProcessStat {
  uint64_t startTime = 0;  // clock ticks since boot
  bool stopped = false;    // by a signal or a debugger
};
std::optional<ProcessStat> statOf(int32_t pid);

// Start time of a process in clock ticks since boot; 0 when there is no such process or it is a
// zombie, nothing when that cannot be learnt now (no descriptor free, no /proc).
std::optional<uint64_t> startTimeOf(int32_t pid);

}  // namespace smddp::transport::shm
