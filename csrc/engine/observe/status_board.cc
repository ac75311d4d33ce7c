#include "engine/observe/status_board.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "common/error.h"
#include "common/log.h"
#include "transport/shm/process_page.h"

namespace smddp::engine::observe {

struct StatusBoard::Page {
  char magic[8] = {'s', 'm', 'd', 'd', 'p', 's', 't', '1'};
  int32_t pid = getpid();
  uint32_t slots = kSlots;
  uint64_t startTime = transport::shm::startTimeOf(getpid()).value_or(0);
};

struct StatusBoard::Slot::Content {
  std::atomic<uint64_t> version;
  std::atomic<uint64_t> group;
  std::atomic<uint64_t> calls;
  std::atomic<int64_t> writtenAt;
  std::atomic<uint64_t> length;
  char text[kSlotBytes - 5 * sizeof(uint64_t)];
};

StatusBoard::StatusBoard() {
  static_assert(sizeof(Page) <= kSlotBytes && sizeof(Slot::Content) == kSlotBytes);
  constexpr size_t kBytes = (1 + kSlots) * kSlotBytes;
  try {
    segment_ = transport::shm::Segment::create(kBytes, "smddp-status");
    segment_->commit(0, kBytes);
    new (segment_->data()) Page;
  } catch (const Error& error) {
    segment_.reset();
    SMDDP_LOG(Info, "engine", "`smddp status` will show nothing of this process: {}", error.what());
  }
}

StatusBoard::Slot StatusBoard::claim() {
  if (!segment_) return {};
  auto* const slots = reinterpret_cast<Slot::Content*>(segment_->data() + kSlotBytes);
  Slot::Content* const free = std::find_if(slots, slots + kSlots, [](const Slot::Content& slot) {
    return slot.version.load(std::memory_order_relaxed) == 0;
  });
  if (free == slots + kSlots) return {};
  free->calls.store(0, std::memory_order_relaxed);
  free->length.store(0, std::memory_order_relaxed);
  free->version.store(2, std::memory_order_release);
  return {segment_, free};
}

std::string StatusBoard::field(const std::string& text) {
  std::string clean = printable(text);
  std::replace_if(
      clean.begin(), clean.end(), [](char c) { return c == '\t' || c == '\n'; }, ' ');
  return clean;
}

void StatusBoard::Slot::end() {
  if (segment_) content_->version.store(0, std::memory_order_release);
  segment_.reset();
}

void StatusBoard::Slot::write(uint64_t group, const std::string& text, Nanoseconds now) {
  if (!segment_) return;
  const uint64_t version = content_->version.load(std::memory_order_relaxed);
  content_->version.store(version + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  const size_t length = std::min(text.size(), sizeof content_->text);
  std::memcpy(content_->text, text.data(), length);
  content_->length.store(length, std::memory_order_relaxed);
  content_->group.store(group, std::memory_order_relaxed);
  content_->writtenAt.store(now, std::memory_order_relaxed);
  content_->version.store(version + 2, std::memory_order_release);
}

void StatusBoard::Slot::setCalls(uint64_t calls) {
  if (segment_) content_->calls.store(calls, std::memory_order_relaxed);
}

}  // namespace smddp::engine::observe
