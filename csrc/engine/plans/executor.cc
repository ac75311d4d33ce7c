#include "engine/plans/executor.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "common/stream_copy.h"
#include "engine/calls/call.h"

namespace smddp::engine::plans {

using plan::Op;
using plan::Ref;
using plan::Space;
using plan::Step;

namespace {
// Before a rank moves at least this many bytes, it wakes its sleeping mates (TeamBell).
constexpr int64_t kLongMove = 4096;
}  // namespace

void Executor::copyIn(const CachedPlan& cached) {
  ownership_.assertOwned();
  cached_ = &cached;
  move(cached.plan.steps[cached.plan.preamble.firstStep], 0);
}

void Executor::sum() {
  ownership_.assertOwned();
  move(cached_->plan.steps[cached_->plan.lanes.front().blocks.front().firstStep], 0);
}

void Executor::start(const CachedPlan& cached, bool arrived) {
  ownership_.assertOwned();
  cached_ = &cached;
  preambleNext_ = arrived ? cached.plan.preamble.numSteps : 0;
  positions_.assign(cached.plan.lanes.size(), {});
  done_ = false;
  exchanged_ = 0;
  hasReceived_ = false;
  bindChannels();
}

// Reserves message numbers on each channel, even if this execution fails. Example: after 50 puts, a plan with 25 puts
// gets 51 to 75, and its message 1 is message 51 of the channel.
void Executor::bindChannels() {
  channels_.clear();
  for (size_t i = 0; i < cached_->plan.channels.size(); ++i) {
    const plan::ChannelUse& use = cached_->plan.channels[i];
    const auto found = track_.find(use.peer, use.stream, cached_->longestMessage[i]);
    SMDDP_CHECK(found != track_.channels.end(), "no channel to rank {}", use.peer);
    channels_.push_back({&*found, found->putsBefore, found->receivesBefore});
    found->putsBefore += static_cast<uint64_t>(use.puts);
    found->receivesBefore += static_cast<uint64_t>(use.receives);
  }
}

void Executor::abandon() {
  ownership_.assertOwned();
  done_ = true;
  for (const BoundChannel& channel : channels_) {
    if (channel.ends->receive != nullptr) channel.ends->receive->withdrawPosts();
  }
}

bool Executor::advance() {
  ownership_.assertOwned();
  if (done_) return false;
  bool advanced = false;
  const plan::Block& preamble = cached_->plan.preamble;
  while (preambleNext_ < preamble.numSteps) {
    if (!execute(preamble.firstStep + preambleNext_, 0)) return advanced;
    ++preambleNext_;
    advanced = true;
    // Before the lanes start, the ranks of the node agree (Operations::agree).
    if (preambleDone()) return true;
  }
  bool finished = true;
  for (size_t lane = 0; lane < positions_.size(); ++lane) {
    advanced |= advanceLane(lane);
    finished &= positions_[lane].block == cached_->plan.lanes[lane].blocks.size();
  }
  // The sources of puts may be user memory: the operation ends when the network has let go of them.
  if (finished && flushed()) {
    done_ = true;
    gathered_.clear();
    advanced = true;
  }
  return advanced;
}

bool Executor::advanceLane(size_t lane) {
  const auto& blocks = cached_->plan.lanes[lane].blocks;
  Position& at = positions_[lane];
  bool advanced = false;
  while (at.block < blocks.size()) {
    const plan::Block& block = blocks[at.block];
    if (!execute(block.firstStep + at.step, at.trip)) return advanced;
    advanced = true;
    if (++at.step < block.numSteps) continue;
    at.step = 0;
    if (++at.trip < block.trips) continue;
    at.trip = 0;
    ++at.block;
  }
  return advanced;
}

bool Executor::execute(uint32_t stepIndex, int64_t trip) {
  const Step& step = cached_->plan.steps[stepIndex];
  const int64_t value = step.value.at(trip);
  switch (step.op) {
    case Op::Copy:
    case Op::Reduce:
      if (step.length >= kLongMove) bell_.ring();
      move(step, trip);
      return true;
    case Op::Signal: {
      if (step.counter == plan::kArrival) {
        track_.arrive(topology_.myLocal());
      } else {
        track_.signal(topology_.myLocal(), step.counter, value);
      }
      bell_.signalled();
      return true;
    }
    case Op::Wait: return counterReached(step, value);
    case Op::Put: {
      bell_.ring();
      const bool isSent = put(step, stepIndex, trip);
      if (isSent) exchanged_ += step.length;
      return isSent;
    }
    case Op::Post: {
      const BoundChannel& channel = channelOf(stepIndex);
      const calls::Buffer::Run run = resolve(step.firstRef, trip, 0, step.length);
      if (run.bytes == step.length) {
        channel.ends->receive->post(channel.receivesBefore + static_cast<uint64_t>(value),
                                    {run.data, static_cast<size_t>(run.bytes)});
      }
      return true;
    }
    case Op::Receive: {
      const bool isHere = received(step, stepIndex, trip);
      if (!isHere) return false;
      exchanged_ += step.length;
      hasReceived_ = true;
      return true;
    }
    case Op::Release: {
      const BoundChannel& channel = channelOf(stepIndex);
      channel.ends->receive->release(channel.receivesBefore + static_cast<uint64_t>(value));
      return true;
    }
    case Op::Flush: {
      const BoundChannel& channel = channelOf(stepIndex);
      return value <= 0 ||
             channel.ends->send->flushed() >= channel.putsBefore + static_cast<uint64_t>(value);
    }
  }
  return false;
}

bool Executor::counterReached(const Step& step, int64_t value) const {
  if (value <= 0) return true;
  const auto reached = [&](int local) {
    return step.counter == plan::kArrival ? track_.hasArrived(local)
                                          : track_.hasReached(local, step.counter, value);
  };
  if (step.who != plan::kMates) return reached(step.who);
  for (int local = 0; local < topology_.teamSize(); ++local) {
    if (local != topology_.myLocal() && !reached(local)) return false;
  }
  return true;
}

calls::Buffer::Run Executor::resolve(uint32_t refIndex, int64_t trip, int64_t skip,
                                     int64_t length) const {
  const Ref& ref = cached_->plan.refs[refIndex];
  const int64_t offset = ref.offset.at(trip) + skip;
  switch (ref.space) {
    case Space::Input: return binding_.input.at(offset, length);
    case Space::Output: return binding_.output.at(offset, length);
    case Space::MateInput: return {binding_.mateInputs[ref.owner] + offset, length};
    case Space::MateOutput: return {binding_.mateOutputs[ref.owner] + offset, length};
    case Space::Residual: return {reinterpret_cast<std::byte*>(binding_.residual) + offset, length};
    case Space::Slot: {
      const plan::Pool& pool = cached_->plan.pools[ref.poolOrStream];
      const int64_t slot = ref.index.at(trip) % pool.slots;
      std::byte* staging = track_.stagingOf(ref.owner);
      return {staging + pool.offset + slot * pool.slotBytes + offset, length};
    }
    case Space::Message: {
      const BoundChannel& channel = channels_[cached_->channelOfRef[refIndex]];
      const auto payload = channel.ends->receive->payload(
          channel.receivesBefore + static_cast<uint64_t>(ref.index.at(trip)) + 1);
      SMDDP_CHECK(offset + length <= static_cast<int64_t>(payload.size()),
                  "a step reads {} bytes of a message of {}", offset + length, payload.size());
      return {const_cast<std::byte*>(payload.data()) + offset, length};
    }
  }
  return {};
}

// Copies the runs of a range, from `skip` bytes on, one behind the other.
void Executor::gather(uint32_t refIndex, int64_t trip, int64_t skip,
                      std::span<std::byte> to) const {
  while (!to.empty()) {
    const calls::Buffer::Run run = resolve(refIndex, trip, skip, static_cast<int64_t>(to.size()));
    std::memcpy(to.data(), run.data, static_cast<size_t>(run.bytes));
    to = to.subspan(static_cast<size_t>(run.bytes));
    skip += run.bytes;
  }
}

bool Executor::hasEncoded(const Step& step) const {
  const plan::Plan& plan = cached_->plan;
  if (plan.wire == Wire::fp32) return false;
  const auto* refs = plan.refs.data() + step.firstRef;
  return std::any_of(refs, refs + step.numDestinations + step.numSources,
                     [](const Ref& ref) { return ref.isEncoded; });
}

// Copies and reductions of which a source or destination is encoded. Goes piece by piece: pieces begin where the blocks
// of encoded ranges do, and a plain vector may consist of several runs.
void Executor::moveEncoded(const Step& step, int64_t trip) {
  constexpr int64_t kPieceBytes = 32 << 10;
  static_assert(kPieceBytes % (sizeof(float) * kBlockElements) == 0);
  const plan::Plan& plan = cached_->plan;
  const uint32_t numRefs = step.numDestinations + uint32_t{step.numSources};
  const reduction::Scale scale = {.post = step.postScale && binding_.op == ReduceOp::AVG,
                                  .divisor = binding_.scale.divisor};
  const uint32_t residualRef = step.firstRef + numRefs;
  for (int64_t done = 0; done < step.length; done += kPieceBytes) {
    const int64_t length = std::min(kPieceBytes, step.length - done);
    auto* const residual =
        step.hasResidual ? reinterpret_cast<float*>(resolve(residualRef, trip, done, length).data)
                         : nullptr;
    bool isInPieces = false;
    // Finds the place of the plain vector, or room for a piece of it that is not one run.
    const auto find = [&](uint32_t i, bool reads) {
      const uint32_t refIndex = step.firstRef + i;
      const Ref& ref = plan.refs[refIndex];
      if (ref.isEncoded)
        return resolve(refIndex, trip, plan.encodedLength(done), plan.encodedLength(length)).data;
      const calls::Buffer::Run run = resolve(refIndex, trip, done, length);
      if (run.bytes == length) return run.data;
      isInPieces = true;
      // The size is the same for all operands, so pointers into it stay valid.
      pieces_.resize(numRefs * static_cast<size_t>(kPieceBytes));
      std::byte* const piece = pieces_.data() + i * kPieceBytes;
      if (reads) gather(refIndex, trip, done, {piece, static_cast<size_t>(length)});
      return piece;
    };
    encodedDestinations_.clear();
    encodedSources_.clear();
    for (uint32_t i = 0; i < numRefs; ++i) {
      const bool isEncoded = plan.refs[step.firstRef + i].isEncoded;
      if (i < step.numDestinations) {
        encodedDestinations_.push_back({find(i, false), isEncoded});
      } else {
        encodedSources_.push_back({find(i, true), isEncoded});
      }
    }
    reduction::reduceEncoded(plan.wire, encodedDestinations_, encodedSources_,
                             static_cast<size_t>(length) / sizeof(float), binding_.op, scale,
                             residual);
    for (uint32_t i = 0; isInPieces && i < step.numDestinations; ++i) {
      const std::byte* const piece = pieces_.data() + i * kPieceBytes;
      if (encodedDestinations_[i].data != piece) continue;
      for (int64_t moved = 0; moved < length;) {
        const calls::Buffer::Run part =
            resolve(step.firstRef + i, trip, done + moved, length - moved);
        std::memcpy(part.data, piece + moved, static_cast<size_t>(part.bytes));
        moved += part.bytes;
      }
    }
  }
}

// A sum of float16 may be beyond its largest number, 65504, although the average is not. Where partial sums go from
// step to step as float16, the first step therefore divides by the power of two that is not less than the number of
// ranks, and the last one by the rest. Example: 6 ranks with 40000 each: partial sums of 5000, 10000, …, 30000;
// 30000 / 0.75 is 40000. A power of two changes no digits, unless the number becomes smaller than 2^-14.
Executor::Arithmetic Executor::arithmeticOf(const Step& step) const {
  ReduceOp op = binding_.op;
  reduction::Scale scale = binding_.scale;
  if (op == ReduceOp::AVG && binding_.type == DataType::float16 &&
      step.preScale != step.postScale) {
    const double power = std::bit_ceil(static_cast<uint64_t>(scale.divisor));
    if (step.preScale) op = ReduceOp::PREMUL_SUM;
    scale.factor = 1.0 / power;
    scale.divisor /= power;
  }
  scale.pre = step.preScale && op == ReduceOp::PREMUL_SUM;
  scale.post = step.postScale && op == ReduceOp::AVG;
  return {op, scale};
}

// Copies and reductions, in as many runs as the buffers are made of.
void Executor::move(const Step& step, int64_t trip) {
  if (hasEncoded(step)) return moveEncoded(step, trip);
  const Arithmetic arithmetic = arithmeticOf(step);
  const auto& scale = arithmetic.scale;
  const bool copies = step.numSources == 1 && !scale.pre && !scale.post;
  const auto elementBytes = static_cast<int64_t>(sizeOf(binding_.type));
  constexpr int64_t kLongBytes = transport::shm::StoreChoice::kLongBytes;
  bool writesToStaging = false;
  if (step.length >= kLongBytes) {
    for (uint32_t i = 0; i < step.numDestinations; ++i) writesToStaging |= isStaging(step, i);
  }
  for (int64_t moved = 0; moved < step.length;) {
    int64_t run = step.length - moved;
    destinations_.clear();
    sources_.clear();
    for (uint32_t i = 0; i < step.numDestinations; ++i) {
      const auto at = resolve(step.firstRef + i, trip, moved, run);
      destinations_.push_back(at.data);
      run = at.bytes;
    }
    for (uint32_t i = 0; i < step.numSources; ++i) {
      const auto at = resolve(step.firstRef + step.numDestinations + i, trip, moved, run);
      sources_.push_back(at.data);
      run = at.bytes;
    }
    const auto write = [&](bool streams) {
      if (streams) {
        writeStreaming(step, run, copies, arithmetic);
      } else if (copies) {
        for (void* destination : destinations_) {
          if (destination != sources_.front()) {
            std::memcpy(destination, sources_.front(), static_cast<size_t>(run));
          }
        }
      } else {
        reduction::reduce(destinations_, sources_, static_cast<size_t>(run / elementBytes),
                          binding_.type, arithmetic.op, scale);
      }
    };
    if (writesToStaging && run >= kLongBytes) {
      track_.stores.write(&step, run, write);
    } else {
      write(false);
    }
    moved += run;
  }
}

bool Executor::isStaging(const Step& step, uint32_t destination) const {
  return cached_->plan.refs[step.firstRef + destination].space == Space::Slot;
}

// Writes staging memory with streaming stores, which bypass the caches. It works piece by piece, so that a sum is still
// in the first-level cache when it is copied. Advances destinations_ and sources_.
void Executor::writeStreaming(const Step& step, int64_t bytes, bool copies,
                              const Arithmetic& arithmetic) {
  constexpr int64_t kPieceBytes = 16384;
  const auto elementBytes = static_cast<int64_t>(sizeOf(binding_.type));
  sums_.resize(kPieceBytes);
  uint32_t other = 0;  // the first destination that is not staging memory
  while (other < step.numDestinations && isStaging(step, other)) ++other;
  for (int64_t left = bytes; left > 0; left -= kPieceBytes) {
    const auto piece = static_cast<size_t>(std::min(kPieceBytes, left));
    const void* result = sources_.front();
    if (!copies) {
      void* sum = other == step.numDestinations ? sums_.data() : destinations_[other];
      reduction::reduce({&sum, 1}, sources_, piece / elementBytes, binding_.type, arithmetic.op,
                        arithmetic.scale);
      result = sum;
    }
    for (uint32_t i = 0; i < step.numDestinations; ++i) {
      if (destinations_[i] == result) continue;
      if (isStaging(step, i)) {
        streamCopy(destinations_[i], result, piece);
      } else {
        std::memcpy(destinations_[i], result, piece);
      }
    }
    for (void*& destination : destinations_)
      destination = static_cast<std::byte*>(destination) + piece;
    for (const void*& source : sources_) source = static_cast<const std::byte*>(source) + piece;
  }
}

// Returns what a put carries, as far as it lies in one run of bytes.
transport::Payload Executor::payloadOf(const Step& step, int64_t trip) const {
  const Ref& ref = cached_->plan.source(step, 0);
  if (ref.space == Space::Input) return binding_.input.payload(ref.offset.at(trip), step.length);
  const auto run = resolve(step.firstRef, trip, 0, step.length);
  return transport::Bytes(run.data, static_cast<size_t>(run.bytes));
}

bool Executor::put(const Step& step, uint32_t stepIndex, int64_t trip) {
  const BoundChannel& channel = channelOf(stepIndex);
  const uint64_t number = channel.putsBefore + static_cast<uint64_t>(step.value.at(trip));
  // Another lane may share the channel: messages leave in the order of their numbers.
  if (channel.ends->send->sent() + 1 != number) return false;
  transport::Payload payload;
  if (step.length > 0) {
    payload = payloadOf(step, trip);
    if (payload.size() < static_cast<size_t>(step.length)) {
      if (!channel.ends->send->hasCredit()) return false;
      Gathered& copy = freeCopy();
      copy.bytes.resize(static_cast<size_t>(step.length));
      gather(step.firstRef, trip, 0, copy.bytes);
      payload = transport::Bytes(copy.bytes);
      if (!channel.ends->send->put(number, payload, binding_.fingerprint)) return false;
      copy.channel = channel.ends->send;
      copy.number = number;
      return true;
    }
  }
  return channel.ends->send->put(number, payload, binding_.fingerprint);
}

Executor::Gathered& Executor::freeCopy() {
  const auto isFree = [](const Gathered& copy) {
    return copy.channel == nullptr || copy.channel->flushed() >= copy.number;
  };
  const auto found = std::ranges::find_if(gathered_, isFree);
  return found != gathered_.end() ? *found : gathered_.emplace_back();
}

bool Executor::received(const Step& step, uint32_t stepIndex, int64_t trip) {
  const BoundChannel& channel = channelOf(stepIndex);
  const uint64_t number = channel.receivesBefore + static_cast<uint64_t>(step.value.at(trip));
  if (channel.ends->receive->arrived() < number) return false;
  const transport::PutHeader& header = channel.ends->receive->header(number);
  membership_.requireSameCall(step.who, header.call, binding_.fingerprint);
  if (header.length != static_cast<uint64_t>(step.length)) {
    raise(ErrorKind::Mismatch,
          "rank {} sent {} bytes where its plan has {}: do all ranks run the same smddp with the "
          "same settings?",
          membership_.jobRank(step.who), header.length, step.length);
  }
  return true;
}

bool Executor::isFlushed(size_t channel) const {
  const BoundChannel& bound = channels_[channel];
  const auto puts = static_cast<uint64_t>(cached_->plan.channels[channel].puts);
  return puts == 0 || bound.ends->send->flushed() >= bound.putsBefore + puts;
}

bool Executor::flushed() const {
  for (size_t i = 0; i < channels_.size(); ++i) {
    if (!isFlushed(i)) return false;
  }
  return true;
}

void Executor::addAwaited(const Step& step, int64_t trip, std::set<Rank>& awaited) const {
  if (step.op != Op::Wait) {
    if (step.who >= 0) awaited.insert(step.who);
    return;
  }
  for (int local = 0; local < topology_.teamSize(); ++local) {
    if (local == topology_.myLocal() || (step.who != plan::kMates && step.who != local)) continue;
    Step one = step;
    one.who = local;
    if (!counterReached(one, step.value.at(trip))) awaited.insert(topology_.team()[local]);
  }
}

BlockedStep Executor::blockedStep() const {
  ownership_.assertOwned();
  BlockedStep found;
  if (cached_ == nullptr || done_) return found;
  const plan::Plan& plan = cached_->plan;
  found.exchanged = exchanged_;
  found.toExchange = cached_->putBytes + cached_->receiveBytes;
  if (!preambleDone()) {
    addAwaited(plan.steps[plan.preamble.firstStep + preambleNext_], 0, found.awaited);
    found.where = "at the arrival";
    return found;
  }
  for (size_t lane = 0; lane < positions_.size(); ++lane) {
    const Position& at = positions_[lane];
    const auto& blocks = plan.lanes[lane].blocks;
    if (at.block == blocks.size()) continue;
    addAwaited(plan.steps[blocks[at.block].firstStep + at.step], at.trip, found.awaited);
    if (found.where.empty()) {
      // A shorter last chunk is a block of its own.
      int64_t chunk = at.trip;
      for (size_t block = 0; block < at.block; ++block) chunk += blocks[block].trips;
      found.where = fmt::format("in stage \"{}\", chunk {}", plan.lanes[lane].name, chunk);
    }
  }
  if (!found.where.empty()) return found;
  found.where = "for the last bytes to leave";
  for (size_t i = 0; i < channels_.size(); ++i) {
    if (!isFlushed(i)) found.awaited.insert(channels_[i].ends->peer);
  }
  return found;
}

}  // namespace smddp::engine::plans
