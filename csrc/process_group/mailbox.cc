#include "process_group/mailbox.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>
#include <span>

#include "engine/operations/matcher.h"
#include "process_group/errors.h"
#include "process_group/message_codec.h"

namespace smddp::process_group {

namespace {

constexpr auto kEnvelope = static_cast<size_t>(engine::operations::Matcher::kMaxBuffered);
// A front up to this length is sent in parts that are as long as the envelope, and so short enough for buffered
// engine messages. A longer one is sent as the envelope and one ordinary engine message.
constexpr size_t kShortFront = 8 * kEnvelope;
// How long a thread that waits polls, yielding the processor, before it sleeps. To sleep and to wake takes 30 to
// 100 us, as long as the call of a small module at the other end.
constexpr Nanoseconds kPollTime = 200'000;

std::span<const std::byte> bytesIn(const at::Tensor& bytes) {
  return {static_cast<const std::byte*>(bytes.const_data_ptr()), bytes.nbytes()};
}

// The begin and length of each part in which a front is sent. With kEnvelope = 960: 2000 bytes are (0, 960), (960, 960)
// and (1920, 80); 10000 bytes are (0, 960) and (960, 9040).
std::vector<std::pair<int64_t, int64_t>> partsOf(size_t total) {
  std::vector<std::pair<int64_t, int64_t>> parts{{0, static_cast<int64_t>(kEnvelope)}};
  const size_t length = total > kShortFront ? total - kEnvelope : kEnvelope;
  for (size_t begin = kEnvelope; begin < total; begin += length) {
    parts.emplace_back(begin, std::min(length, total - begin));
  }
  return parts;
}

}  // namespace

Mailbox::Mailbox(c10::intrusive_ptr<ProcessGroup> group) : group_(std::move(group)) {}

void Mailbox::open() {
  std::vector<Stream> streams;
  for (int peer = 0; peer < group_->getSize(); ++peer) {
    if (peer != group_->getRank()) streams.emplace_back(peer);
  }
  streams_ = std::move(streams);
}

engine::calls::CompletionPtr Mailbox::submit(bool send, int peer, at::Tensor bytes, bool buffered) {
  auto message = group_->newMessage(send, peer, 0,
                                    {{static_cast<std::byte*>(bytes.data_ptr()), bytes.nbytes()}});
  message.buffered = buffered;
  message.keepAlive = std::make_shared<at::Tensor>(std::move(bytes));
  const auto target = group_->group();
  return group_->engine_->submit(*target, std::move(message));
}

void Mailbox::interrupt() {
  interrupted_.store(true);
  group_->engine_->progress().wakeWaiters();
}

std::vector<Mailbox::Arrival> Mailbox::take(bool block) {
  const c10::InferenceMode guard(false);
  std::vector<Arrival> arrived;
  translated([&] {
    const engine::progress::WaitScope waiting(group_->engine_->progress());
    while (!streams_.empty()) {
      std::erase_if(streams_, [&](Stream& stream) { return !advance(stream, arrived); });
      if (!arrived.empty() || !block || interrupted_.exchange(false)) break;
      waitForStreams();
    }
    withdraw();
  });
  return arrived;
}

void Mailbox::waitForStreams() {
  std::vector<engine::calls::CompletionPtr> receives;
  for (const Stream& stream : streams_) {
    // Receives of a stream end in order.
    receives.push_back(stream.receives.back());
  }
  group_->engine_->waitForAny(*group_->members()->group, receives, interrupted_, kPollTime);
}

void Mailbox::withdraw() {
  std::vector<engine::calls::CompletionPtr> receives;
  for (const Stream& stream : streams_) {
    if (stream.expects == Stream::Envelope) receives.push_back(stream.receives.back());
  }
  if (receives.empty()) return;
  const auto kept = group_->engine_->withdraw(*group_->group(), receives);
  for (Stream& stream : streams_) {
    if (stream.expects != Stream::Envelope) continue;
    const bool stays = std::find(kept.begin(), kept.end(), stream.receives.back()) != kept.end();
    if (!stays) stream.receives.clear();
  }
}

bool Mailbox::advance(Stream& stream, std::vector<Arrival>& arrived) {
  try {
    while (true) {
      if (stream.receives.empty() && stream.expects == Stream::Envelope) {
        stream.front = newBytes(kEnvelope);
        receiveFront(stream, 0);
      }
      for (const auto& receive : stream.receives) {
        if (!receive->done()) return true;
        if (receive->error()) throw *receive->error();
      }
      stream.receives.clear();
      if (stream.expects == Stream::Envelope) {
        readEnvelope(stream);
      } else if (stream.expects == Stream::Rest) {
        readFront(stream);
      } else {
        stream.expects = Stream::Envelope;
        const bool last = stream.arriving.last;
        arrived.push_back(std::exchange(stream.arriving, {}));
        if (last) return false;
      }
    }
  } catch (const Error& error) {
    arrived.push_back({stream.peer, {}, {}, true, toTorch(error)});
  } catch (const std::exception&) {
    arrived.push_back({stream.peer, {}, {}, true, std::current_exception()});
  }
  return false;
}

void Mailbox::receiveFront(Stream& stream, int64_t first) {
  const auto parts = partsOf(stream.front.nbytes());
  for (auto i = static_cast<size_t>(first); i < parts.size(); ++i) {
    const auto [begin, length] = parts[i];
    stream.receives.push_back(
        submit(false, stream.peer, byteView(stream.front, begin, length), false));
  }
}

void Mailbox::readEnvelope(Stream& stream) {
  stream.expects = Stream::Rest;
  const size_t length = frontLength(bytesIn(stream.front));
  if (length <= kEnvelope) return;
  const at::Tensor envelope = std::exchange(stream.front, newBytes(length));
  std::memcpy(stream.front.mutable_data_ptr(), envelope.const_data_ptr(), kEnvelope);
  receiveFront(stream, 1);
}

void Mailbox::readFront(Stream& stream) {
  DecodedMessage message = decodeFront(bytesIn(stream.front));
  stream.arriving = {
      stream.peer, std::move(message.header), std::move(message.tensors), message.last, {}};
  for (at::Tensor& bytes : message.largeTensors) {
    stream.receives.push_back(submit(false, stream.peer, std::move(bytes), false));
  }
  stream.expects = Stream::Tensors;
}

void Mailbox::send(int peer, const std::string& header,
                   const std::vector<std::optional<at::Tensor>>& tensors, bool last) {
  const c10::InferenceMode guard(false);
  EncodedMessage message = encodeMessage(header, tensors, last, kEnvelope);
  const auto gone = [](const Sending& sending) {
    return std::all_of(sending.begin(), sending.end(),
                       [](const auto& completion) { return completion->done(); });
  };
  translated([&] {
    // The parts of two messages must not be interleaved.
    const std::lock_guard lock(mutex_);
    while (!sending_.empty() && gone(sending_.front())) sending_.pop_front();
    Sending sending;
    for (const auto& [begin, length] : partsOf(message.length)) {
      sending.push_back(
          submit(true, peer, byteView(message.front, begin, length), /*buffered=*/true));
    }
    for (at::Tensor& bytes : message.largeTensors) {
      sending.push_back(submit(true, peer, std::move(bytes), /*buffered=*/false));
    }
    if (!gone(sending)) sending_.push_back(std::move(sending));
  });
}

void Mailbox::flush() {
  std::deque<Sending> sending;
  {
    const std::lock_guard lock(mutex_);
    sending.swap(sending_);
  }
  // A send that has failed is done, too. The stream from that peer reports the failure.
  translated([&] {
    for (const Sending& one : sending) {
      for (const auto& completion : one)
        group_->engine_->wait(*group_->members()->group, *completion);
    }
  });
}

}  // namespace smddp::process_group
