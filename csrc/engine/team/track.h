// A track is the set of resources (counters, staging memory, channels) that one execution uses. It keeps how many
// messages earlier executions have used on each channel.
//
// Made by Team. Its memory lies in the regions (region.h) of the node's ranks: each rank writes its own words, and the
// functions here are how it reads those of its mates. Used by the thread that owns the engine.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "engine/memory/region.h"
#include "transport/channel.h"
#include "transport/shm/store_choice.h"

namespace smddp::engine::team {

// A word that another process may change at any time. Load it once; check and use that copy.
template <typename T>
T loadShared(T& word) {
  return std::atomic_ref<T>(word).load(std::memory_order_relaxed);
}

// A stream of a plan between two ranks has two channels: one with slots for short messages, and one whose slots have
// room for any. So a group that sends short messages only, as most groups do, has small windows. An execution uses one
// of the two. Its longest message, which both ranks know, decides which.
inline constexpr int64_t kShortSlotBytes = 16 << 10;

// This rank's ends of such a channel to and from one other rank.
struct ChannelEnds {
  Rank peer = 0;
  uint8_t stream = 0;
  bool isShort = false;                          // no message has more than kShortSlotBytes
  transport::SendChannel* send = nullptr;        // null until a plan puts on it
  transport::ReceiveChannel* receive = nullptr;  // null until a plan receives from it
  uint64_t putsBefore = 0;                       // messages of all earlier executions
  uint64_t receivesBefore = 0;
};

struct Track {
  int64_t index = 0;
  // Counts the executions of *this track*, from 1. Its lowest bit chooses the half. With 4 tracks, executions 0, 4 and
  // 8 of the group are executions 1, 2 and 3 of track 0.
  uint64_t executionNumber = 0;
  // Shape::afterArrival of this execution's plan: some rank arrived without copying, so this plan was chosen then, and
  // copies nothing before. (A plan chosen again only because fewer requests are fused does not count.)
  bool afterArrival = false;
  // By local index, mine included.
  std::vector<memory::TrackHeader*> headers;
  std::vector<std::array<std::byte*, 2>> halves;
  std::vector<ChannelEnds> channels;
  transport::shm::StoreChoice stores;
  std::array<size_t, 2> committed{};   // bytes of each of my halves that have backing
  std::array<size_t, 2> registered{};  // bytes of them from which puts may leave

  // The channel of an execution whose longest message on the stream has this many bytes; end() if there is none yet.
  std::vector<ChannelEnds>::iterator find(Rank rank, uint8_t stream, int64_t longestMessage) {
    const bool isShort = longestMessage <= kShortSlotBytes;
    return std::find_if(channels.begin(), channels.end(), [&](const ChannelEnds& ends) {
      return ends.peer == rank && ends.stream == stream && ends.isShort == isShort;
    });
  }
  memory::Arrival& arrivalOf(int local) const {
    return headers[local]->arrivals[executionNumber & 1];
  }
  void arrive(int myLocal) {
    arrivalOf(myLocal).number.store(executionNumber, std::memory_order_release);
  }
  bool hasArrived(int local) const {
    return arrivalOf(local).number.load(std::memory_order_acquire) >= executionNumber;
  }
  void signal(int myLocal, uint8_t counter, int64_t value) {
    headers[myLocal]->counters[counter].value.store(memory::counterValue(executionNumber, value),
                                                    std::memory_order_release);
  }
  bool hasReached(int local, uint8_t counter, int64_t value) const {
    return headers[local]->counters[counter].value.load(std::memory_order_acquire) >=
           memory::counterValue(executionNumber, value);
  }
  // Returns the place of the slots of a rank. The arrival record says where they are for the plan with which the rank
  // arrived. A plan with `afterArrival` does not use the memory beside the record.
  std::byte* stagingOf(int local) const {
    memory::Arrival& arrival = arrivalOf(local);
    return loadShared(arrival.isNear) != 0 && !afterArrival ? arrival.near.data()
                                                            : halves[local][executionNumber & 1];
  }
};

}  // namespace smddp::engine::team
