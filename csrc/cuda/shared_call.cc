#include "cuda/shared_call.h"

#include <algorithm>

#include "common/error.h"

namespace smddp::cuda {

SharedCall::SharedCall(SharedGpu& gpu, const Call& call, const Buffers& mine, Stream& stream,
                       Exchange& exchange)
    : gpu_(gpu), call_(call), mine_(mine), stream_(stream), exchange_(exchange) {
  stream_.mark();
}

bool SharedCall::advance() {
  while (true) {
    switch (state_) {
      case State::OnGpu:
        if (!stream_.reached()) return false;
        meet();
        if (state_ == State::Ended) return true;
        break;
      case State::Meeting:
        if (!exchange_.done()) return false;
        compare();
        startPart();
        break;
      case State::Ended: return true;
    }
  }
}

void SharedCall::meet() {
  // A call gets its number when it begins, not when it is made: they begin in the same order on all ranks.
  if (part_ == 0) said_ = gpu_.describe(call_, mine_);
  said_.part = part_;
  const bool last = part_ == parts_;
  exposed_ = true;
  state_ = last ? State::Ended : State::Meeting;
  exchange_.begin(said_, last);
}

void SharedCall::compare() const {
  const std::string text = differenceOf(exchange_.all());
  if (text.empty()) return;
  raise(ErrorKind::Mismatch, "{}; all ranks have to make the same calls in the same order", text);
}

void SharedCall::startPart() {
  const auto all = exchange_.all();
  if (part_ == 0) {
    // All ranks read the same descriptors, and so choose the same way.
    direct_ =
        std::all_of(all.begin(), all.end(), [](const auto& said) { return said.canShare != 0; });
    for (const Descriptor& said : all) {
      for (const uint64_t block : said.splits.to) call_.bytes = std::max(call_.bytes, block);
    }
    parts_ = direct_ ? 1 : numStagedParts(call_, gpu_.half());
  }
  const auto jobs = direct_ ? directJobs(call_, gpu_.open(all, mine_))
                            : stagedJobs(call_, part_, gpu_.half(), mine_, gpu_.workspaces());
  gpu_.run(jobs, stream_.handle());
  ++part_;
  stream_.mark();
  state_ = State::OnGpu;
}

}  // namespace smddp::cuda
