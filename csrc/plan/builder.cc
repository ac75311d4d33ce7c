#include "plan/builder.h"

#include <algorithm>

namespace smddp::plan {
namespace {

// The lane of the steps that post. They wait for nothing.
constexpr const char* kPosts = "post";

int64_t roundUp(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Sets the stride of `first` so that it equals `second` one trip later.
void takeDifference(Affine& first, const Affine& second) {
  first.perTrip = second.base - first.base;
}

}  // namespace

Range share(Range whole, int i, int parts, int64_t limit) {
  const int64_t granules = roundUp(whole.length, kGranule) / kGranule;
  const auto boundary = [&](int64_t part) {
    return std::min({granules * part / parts * kGranule, whole.length, limit});
  };
  const int64_t from = boundary(i);
  return {whole.offset + from, boundary(i + 1) - from};
}

Builder::Builder(const Topology& topology, const Limits& limits, std::string name)
    : topology_(topology), limits_(limits) {
  plan_.name = std::move(name);
}

Ref Builder::mateIn(int local, int64_t offset) {
  shareBuffers();
  return {Space::MateInput, 0, false, local, {}, {offset, 0}};
}

Ref Builder::mateOut(int local, int64_t offset) {
  shareBuffers();
  return {Space::MateOutput, 0, false, local, {}, {offset, 0}};
}

uint8_t Builder::pool(std::string name, int64_t slots, int64_t slotBytes) {
  SMDDP_CHECK(slots > 0 && slotBytes >= 0, "pool {} of {} x {} bytes", name, slots, slotBytes);
  const int64_t stride = std::max(roundUp(slotBytes, kGranule), kGranule);
  plan_.pools.push_back({std::move(name), slots, stride, plan_.stagingBytes});
  plan_.stagingBytes += slots * stride;
  if (plan_.stagingBytes > limits_.halfBytes) {
    raise(ErrorKind::Resource, "{} needs {} bytes of staging memory, of {}: raise SMDDP_POOL_BYTES",
          plan_.name, plan_.stagingBytes, limits_.halfBytes);
  }
  SMDDP_CHECK(plan_.pools.size() <= size_t{UINT8_MAX} + 1, "{}: more than 256 pools", plan_.name);
  return static_cast<uint8_t>(plan_.pools.size() - 1);
}

void Builder::arrive() {
  SMDDP_CHECK(!arrived_ && stages_.empty(), "{}: one arrival, before the first stage", plan_.name);
  signal(kArrival, 1);
  waitMates(kArrival, 1);
  arrived_ = true;
  // The first lane: it posts all messages before another one sends what they answer.
  stages_.push_back({kPosts, {}});
}

void Builder::stage(const std::string& name) {
  SMDDP_CHECK(arrived_, "{}: stage {} precedes the arrival", plan_.name, name);
  for (size_t i = 0; i < stages_.size(); ++i) {
    if (stages_[i].name == name) {
      current_ = static_cast<int>(i);
      return;
    }
  }
  stages_.push_back({name, {}});
  current_ = static_cast<int>(stages_.size()) - 1;
}

void Builder::write(Step step, std::vector<Ref> refs) {
  if (!arrived_) {
    preamble_.push_back({step, std::move(refs)});
    return;
  }
  SMDDP_CHECK(current_ >= 0, "{}: a step after the arrival belongs to a stage", plan_.name);
  (*target_)[static_cast<size_t>(current_)].push_back({step, std::move(refs)});
}

void Builder::copy(std::vector<Ref> destinations, Ref source, int64_t length, Scales scales,
                   std::optional<Ref> residual) {
  move(Op::Copy, std::move(destinations), {&source, 1}, length, scales, residual);
}

void Builder::reduce(std::vector<Ref> destinations, std::vector<Ref> sources, int64_t length,
                     Scales scales, std::optional<Ref> residual) {
  move(Op::Reduce, std::move(destinations), sources, length, scales, residual);
}

void Builder::move(Op op, std::vector<Ref> destinations, std::span<const Ref> sources,
                   int64_t length, Scales scales, std::optional<Ref> residual) {
  if (length == 0) return;
  Step step;
  step.op = op;
  step.preScale = scales.pre;
  step.postScale = scales.post;
  step.hasResidual = residual.has_value();
  SMDDP_CHECK(std::max(destinations.size(), sources.size()) <= UINT16_MAX,
              "{}: a step from {} to {} ranges", plan_.name, sources.size(), destinations.size());
  step.numDestinations = static_cast<uint16_t>(destinations.size());
  step.numSources = static_cast<uint16_t>(sources.size());
  step.length = length;
  std::vector<Ref> refs = std::move(destinations);
  refs.insert(refs.end(), sources.begin(), sources.end());
  if (residual) refs.push_back(*residual);
  write(step, std::move(refs));
}

void Builder::signal(int counter, int64_t value) {
  Step step;
  step.op = Op::Signal;
  step.counter = static_cast<uint8_t>(counter);
  step.value.base = value;
  write(step, {});
}

void Builder::waitMates(int counter, int64_t value) { waitRank(kMates, counter, value); }

void Builder::waitRank(int local, int counter, int64_t value) {
  Step step;
  step.op = Op::Wait;
  step.who = local;
  step.counter = static_cast<uint8_t>(counter);
  step.value.base = value;
  write(step, {});
}

Step Builder::channelStep(Op op, Rank rank, int stream, int64_t value, int64_t length) const {
  SMDDP_CHECK(topology_.nodeOf(rank) != topology_.myNode(), "{}: a channel to rank {} of this node",
              plan_.name, rank);
  SMDDP_CHECK(stream >= 0 && stream < kNumStreams, "stream {}", stream);
  SMDDP_CHECK(length <= limits_.messageBytes, "{}: a message of {} bytes", plan_.name, length);
  Step step;
  step.op = op;
  step.who = rank;
  step.stream = static_cast<uint8_t>(stream);
  step.value.base = value;
  step.length = length;
  return step;
}

void Builder::put(Rank to, int stream, Ref source, int64_t length) {
  const int64_t number = ++channels_[{to, stream}].puts;
  if (source.isEncoded) length = encodedLength(length);
  Step step = channelStep(Op::Put, to, stream, number, length);
  step.numSources = 1;
  write(step, {source});
}

Ref Builder::receive(Rank from, int stream, int64_t length) {
  const int64_t number = ++channels_[{from, stream}].receives;
  write(channelStep(Op::Receive, from, stream, number, length), {});
  return {Space::Message, static_cast<uint8_t>(stream), false, from, {number - 1, 0}, {}};
}

Ref Builder::receiveAt(Ref destination, Rank from, int stream, int64_t length) {
  if (length > 0 && destination.space != Space::Slot) {
    Step post = channelStep(Op::Post, from, stream, channels_[{from, stream}].receives + 1, length);
    post.numDestinations = 1;
    const int here = current_;
    stage(kPosts);
    write(post, {destination});
    current_ = here;
  }
  return receive(from, stream, length);
}

Ref Builder::receiveEncoded(Rank from, int stream, int64_t length) {
  return encoded(receive(from, stream, encodedLength(length)));
}

void Builder::release(Rank from, int stream) {
  write(channelStep(Op::Release, from, stream, ++channels_[{from, stream}].releases, 0), {});
}

void Builder::flush(Rank to, int stream, int64_t count) {
  write(channelStep(Op::Flush, to, stream, count, 0), {});
}

void Builder::flush(Rank to, int stream) { flush(to, stream, channels_[{to, stream}].puts); }

Builder::Script Builder::record(const std::function<void(const Chunk&)>& body, const Chunk& chunk) {
  Script script;
  target_ = &script;
  inChunk_ = true;
  body(chunk);
  inChunk_ = false;
  target_ = &pending_;
  return script;
}

Builder::Channels Builder::advance(const Channels& start, const Channels& end, int64_t times) {
  Channels result = start;
  for (const auto& [key, after] : end) {
    const auto found = start.find(key);
    const ChannelCount before = found == start.end() ? ChannelCount{} : found->second;
    result[key] = {before.puts + (after.puts - before.puts) * times,
                   before.receives + (after.receives - before.receives) * times,
                   before.releases + (after.releases - before.releases) * times};
  }
  return result;
}

void Builder::eachChunk(int64_t bytes, int64_t chunkBytes,
                        const std::function<void(const Chunk&)>& body) {
  SMDDP_CHECK(arrived_ && !inChunk_, "{}: chunks follow the arrival and do not nest", plan_.name);
  flushPending();
  // Round the limit down first: chunks are rounded up to granules below and must not exceed it.
  chunkBytes = std::max(kGranule, chunkBytes / kGranule * kGranule);
  const int64_t pieces = std::max<int64_t>(1, (bytes + chunkBytes - 1) / chunkBytes);
  const int64_t full = std::max(kGranule, roundUp((bytes + pieces - 1) / pieces, kGranule));
  const int64_t numFull = bytes / full;
  const auto chunkAt = [&](int64_t i) {
    return Chunk{i, i * full, std::min(full, bytes - i * full), full};
  };

  if (numFull > 0) {
    const Channels start = channels_;
    Script first = record(body, chunkAt(0));
    const Channels afterFirst = channels_;
    if (numFull > 1) {
      const auto sameShape = [&](const Script& other) {
        return first.size() == other.size() &&
               std::equal(first.begin(), first.end(), other.begin(), [](auto& a, auto& b) {
                 return a.first == b.first && a.second.size() == b.second.size();
               });
      };
      const auto fits = [&](const Script& other, int64_t k) {
        if (!sameShape(other)) return false;
        for (const auto& [stage, steps] : first) {
          for (size_t i = 0; i < steps.size(); ++i) {
            Written expected = steps[i];
            expected.step.value = {expected.step.value.at(k), 0};
            for (Ref& ref : expected.refs) {
              ref.index = {ref.index.at(k), 0};
              ref.offset = {ref.offset.at(k), 0};
            }
            const Written& actual = other.at(stage)[i];
            if (expected.step != actual.step || expected.refs != actual.refs) return false;
          }
        }
        return true;
      };
      const Script second = record(body, chunkAt(1));
      SMDDP_CHECK(sameShape(second), "{}: chunks 0 and 1 differ in their steps", plan_.name);
      for (auto& [stage, steps] : first) {
        for (size_t i = 0; i < steps.size(); ++i) {
          const Written& next = second.at(stage)[i];
          SMDDP_CHECK(steps[i].refs.size() == next.refs.size(), "{}: chunks differ", plan_.name);
          takeDifference(steps[i].step.value, next.step.value);
          for (size_t r = 0; r < next.refs.size(); ++r) {
            takeDifference(steps[i].refs[r].index, next.refs[r].index);
            takeDifference(steps[i].refs[r].offset, next.refs[r].offset);
          }
        }
      }
      channels_ = advance(start, afterFirst, numFull - 1);
      SMDDP_CHECK(fits(record(body, chunkAt(numFull - 1)), numFull - 1) && fits(second, 1),
                  "{}: the chunks are not affine in their index", plan_.name);
    }
    channels_ = advance(start, afterFirst, numFull);
    emit(std::move(first), numFull);
  }
  if (numFull * full < bytes || numFull == 0) emit(record(body, chunkAt(numFull)), 1);
}

void Builder::emit(Script&& script, int64_t trips) {
  for (auto& [stage, steps] : script) {
    if (steps.empty()) continue;
    const auto firstStep = static_cast<uint32_t>(plan_.steps.size());
    for (Written& written : steps) {
      written.step.firstRef = static_cast<uint32_t>(plan_.refs.size());
      plan_.refs.insert(plan_.refs.end(), written.refs.begin(), written.refs.end());
      plan_.steps.push_back(written.step);
    }
    const Block block{firstStep, static_cast<uint32_t>(steps.size()), trips};
    stages_[stage].blocks.push_back(block);
  }
}

void Builder::flushPending() {
  emit(std::move(pending_), 1);
  pending_.clear();
}

Plan Builder::done() {
  SMDDP_CHECK(arrived_, "{}: a plan begins with an arrival", plan_.name);
  flushPending();
  plan_.preamble.firstStep = static_cast<uint32_t>(plan_.steps.size());
  plan_.preamble.numSteps = static_cast<uint32_t>(preamble_.size());
  for (Written& written : preamble_) {
    written.step.firstRef = static_cast<uint32_t>(plan_.refs.size());
    plan_.refs.insert(plan_.refs.end(), written.refs.begin(), written.refs.end());
    plan_.steps.push_back(written.step);
  }
  for (Stage& stage : stages_) {
    if (!stage.blocks.empty()) plan_.lanes.push_back({stage.name, std::move(stage.blocks)});
  }
  for (const auto& [key, count] : channels_) {
    SMDDP_CHECK(count.receives == count.releases, "{}: {} messages received, {} released",
                plan_.name, count.receives, count.releases);
    plan_.channels.push_back(
        {key.first, static_cast<uint8_t>(key.second), count.puts, count.receives});
  }
  return std::move(plan_);
}

}  // namespace smddp::plan
