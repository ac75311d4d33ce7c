// What one operation at a time of a group runs on: the team's counters and staging halves, and the channels
// to other nodes, each with how far earlier executions have moved it.
#pragma once

#include <vector>

#include "engine/region.h"
#include "transport/channel.h"
#include "transport/shm/store_choice.h"

namespace smddp::engine {

struct ChannelEnds {
  Rank peer = 0;
  uint8_t stream = 0;
  transport::SendChannel* send = nullptr;        // null until a plan puts on it
  transport::ReceiveChannel* receive = nullptr;  // null until a plan receives from it
  uint64_t putsBefore = 0;  // messages of the executions that have ended, or been started, before
  uint64_t arrivalsBefore = 0;
};

struct Track {
  int64_t index = 0;
  uint64_t execution = 0;  // number of the one that runs, or ran last; the first is 1
  // By local index, mine included.
  std::vector<TrackHeader*> headers;
  std::vector<std::array<std::byte*, 2>> halves;
  std::vector<ChannelEnds> channels;
  transport::shm::StoreChoice stores;

  Arrival& arrivalOf(int local) const { return headers[local]->arrivals[execution & 1]; }
  // Where the slots of a rank are. If some rank has shared buffers, the plan may be another one than that for which
  // the arrival was written.
  std::byte* stagingOf(int local, bool anyShared) const {
    Arrival& arrival = arrivalOf(local);
    return arrival.isNear != 0 && !anyShared ? arrival.near.data() : halves[local][execution & 1];
  }
};

}  // namespace smddp::engine
