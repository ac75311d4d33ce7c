#include "process_group/mailbox.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>
#include <span>

#include "engine/matcher.h"
#include "process_group/errors.h"

namespace smddp::process_group {

namespace {

constexpr auto kEnvelope = static_cast<size_t>(engine::Matcher::kShortBytes);
// Below this a tensor is copied into the front of a message, as long as that stays short; above, it travels alone.
constexpr size_t kInside = 4096;
// Up to this a front travels in buffered messages.
constexpr size_t kShortFront = 8 * kEnvelope;
// How long a wait looks again and again, and leaves the processor to whoever wants it, before it sleeps. To sleep and
// be woken costs 30 to 100 us; the other end of a call of a small module takes as long.
constexpr Nanoseconds kPatience = 200'000;

struct Front {
  uint32_t head = 0;     // bytes
  uint32_t tensors = 0;  // how many
  uint32_t total = 0;    // bytes of front, head, descriptions and short tensors
  uint32_t last = 0;
};

struct Description {
  enum Kind : uint8_t { None, Inside, Alone };
  Kind kind = None;
  int8_t type = 0;  // c10::ScalarType
  uint8_t requiresGrad = 0;
  uint8_t dimensions = 0;
};

// Past the dispatcher: the thread may be within modes of the code that waits on it.
at::Tensor newTensor(at::IntArrayRef sizes, at::ScalarType type) {
  return at::detail::empty_cpu(sizes, type);
}

at::Tensor newBytes(size_t size) { return newTensor({static_cast<int64_t>(size)}, at::kByte); }

// Some of the memory of a dense tensor, shared.
at::Tensor partOf(const at::Tensor& tensor, int64_t begin, int64_t length) {
  auto bytes = newTensor({0}, at::kByte);
  at::TensorImpl* part = bytes.unsafeGetTensorImpl();
  const auto size = static_cast<int64_t>(tensor.element_size());
  part->set_storage_keep_dtype(tensor.storage());
  part->set_storage_offset(tensor.storage_offset() * size + begin);
  part->set_sizes_contiguous({length});
  return bytes;
}

// A tensor as dense host memory; usually itself.
at::Tensor sendable(const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.is_meta(),
              "a parameter that lives on another rank cannot be sent from this one");
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided && !tensor.is_quantized(),
                   "smp cannot send tensors of ", tensor.dtype(), ", ", tensor.layout(),
                   " between ranks");
  const bool plain = tensor.is_cpu() && !tensor.is_conj() && !tensor.is_neg();
  if (plain && tensor.is_contiguous()) return tensor;
  const at::NoGradGuard guard;
  return tensor.cpu().resolve_conj().resolve_neg().contiguous();
}

class Writer {
 public:
  void raw(const void* data, size_t size) {
    const auto* begin = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), begin, begin + size);
  }
  template <typename Value>
  void value(const Value& value) {
    raw(&value, sizeof(value));
  }
  std::vector<std::byte>& bytes() { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : left_(bytes) {}
  std::span<const std::byte> raw(size_t size) {
    TORCH_CHECK(size <= left_.size(), "smp: a message between ranks is damaged");
    const auto begin = left_.first(size);
    left_ = left_.subspan(size);
    return begin;
  }
  template <typename Value>
  Value value() {
    Value value;
    std::memcpy(&value, raw(sizeof(value)).data(), sizeof(value));
    return value;
  }

 private:
  std::span<const std::byte> left_;
};

// How a front of so many bytes is divided: begin and length of each part.
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

engine::CompletionPtr Mailbox::submit(bool send, int peer, at::Tensor bytes, bool buffered) {
  auto message = group_->newMessage(send, peer, 0,
                                    {{static_cast<std::byte*>(bytes.data_ptr()), bytes.nbytes()}});
  message.buffered = buffered;
  message.keepAlive = std::make_shared<at::Tensor>(std::move(bytes));
  const auto target = group_->group();
  return group_->engine_->submit(*target, std::move(message));
}

void Mailbox::interrupt() {
  interrupted_.store(true);
  group_->engine_->wakeWaiters();
}

std::vector<Mailbox::Arrival> Mailbox::take(bool block) {
  const c10::InferenceMode guard(false);
  std::vector<Arrival> arrived;
  translated([&] {
    const engine::Engine::Attendance attendance(*group_->engine_);
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
  std::vector<engine::CompletionPtr> receives;
  for (const Stream& stream : streams_) {
    // The last of a stream ends last.
    receives.push_back(stream.receives.back());
  }
  group_->engine_->waitForAny(receives, interrupted_, kPatience);
}

void Mailbox::withdraw() {
  std::vector<engine::CompletionPtr> receives;
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
  } catch (const std::exception& error) {
    arrived.push_back({stream.peer, {}, {}, true, error.what()});
    return false;
  }
}

void Mailbox::receiveFront(Stream& stream, int64_t first) {
  const auto parts = partsOf(stream.front.nbytes());
  for (auto i = static_cast<size_t>(first); i < parts.size(); ++i) {
    const auto [begin, length] = parts[i];
    stream.receives.push_back(
        submit(false, stream.peer, partOf(stream.front, begin, length), false));
  }
}

void Mailbox::readEnvelope(Stream& stream) {
  Front front;
  std::memcpy(&front, stream.front.const_data_ptr(), sizeof(front));
  stream.expects = Stream::Rest;
  if (front.total <= kEnvelope) return;
  const at::Tensor envelope = std::exchange(stream.front, newBytes(front.total));
  std::memcpy(stream.front.mutable_data_ptr(), envelope.const_data_ptr(), kEnvelope);
  receiveFront(stream, 1);
}

void Mailbox::readFront(Stream& stream) {
  Reader reader(
      {static_cast<const std::byte*>(stream.front.const_data_ptr()), stream.front.nbytes()});
  const auto front = reader.value<Front>();
  const auto head = reader.raw(front.head);
  Arrival& arrival = stream.arriving;
  arrival.peer = stream.peer;
  arrival.head.assign(reinterpret_cast<const char*>(head.data()), head.size());
  arrival.last = front.last != 0;
  for (uint32_t i = 0; i < front.tensors; ++i) {
    const auto about = reader.value<Description>();
    auto& place = arrival.tensors.emplace_back();
    if (about.kind == Description::None) continue;
    std::vector<int64_t> sizes;
    for (int d = 0; d < about.dimensions; ++d) sizes.push_back(reader.value<int64_t>());
    place = newTensor(sizes, static_cast<at::ScalarType>(about.type));
    if (about.kind == Description::Inside) {
      const auto bytes = reader.raw(place->nbytes());
      if (!bytes.empty()) std::memcpy(place->mutable_data_ptr(), bytes.data(), bytes.size());
    } else {
      const auto size = static_cast<int64_t>(place->nbytes());
      stream.receives.push_back(submit(false, stream.peer, partOf(*place, 0, size), false));
    }
    place->set_requires_grad(about.requiresGrad != 0);
  }
  stream.expects = Stream::Tensors;
}

void Mailbox::send(int peer, const std::string& head,
                   std::vector<std::optional<at::Tensor>> tensors, bool last) {
  const c10::InferenceMode guard(false);
  Writer writer;
  writer.bytes().reserve(kInside + kEnvelope);
  Front front{static_cast<uint32_t>(head.size()), static_cast<uint32_t>(tensors.size()), 0, last};
  writer.value(front);
  writer.raw(head.data(), head.size());
  std::vector<at::Tensor> alone;
  size_t inside = 0;
  for (const auto& tensor : tensors) {
    Description about;
    if (!tensor) {
      writer.value(about);
      continue;
    }
    const at::Tensor data = sendable(*tensor);
    const bool isInside = inside + data.nbytes() <= kInside;
    about = {isInside ? Description::Inside : Description::Alone,
             static_cast<int8_t>(data.scalar_type()), tensor->requires_grad(),
             static_cast<uint8_t>(data.dim())};
    writer.value(about);
    for (const int64_t size : data.sizes()) writer.value(size);
    if (isInside) {
      inside += data.nbytes();
      writer.raw(data.const_data_ptr(), data.nbytes());
    } else {
      alone.push_back(partOf(data, 0, static_cast<int64_t>(data.nbytes())));
    }
  }
  auto& bytes = writer.bytes();
  front.total = static_cast<uint32_t>(bytes.size());
  std::memcpy(bytes.data(), &front, sizeof(front));
  const at::Tensor whole = newBytes(std::max(bytes.size(), kEnvelope));
  std::memcpy(whole.mutable_data_ptr(), bytes.data(), bytes.size());
  const auto gone = [](const Sending& sending) {
    return std::all_of(sending.begin(), sending.end(),
                       [](const auto& completion) { return completion->done(); });
  };
  translated([&] {
    // The parts of two messages must not mix.
    const std::lock_guard lock(mutex_);
    while (!sending_.empty() && gone(sending_.front())) sending_.pop_front();
    Sending sending;
    for (const auto& [begin, length] : partsOf(bytes.size())) {
      sending.push_back(submit(true, peer, partOf(whole, begin, length), /*buffered=*/true));
    }
    for (at::Tensor& tensor : alone) {
      sending.push_back(submit(true, peer, std::move(tensor), /*buffered=*/false));
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
  // What cannot go any more ends with an error; the stream from that peer says so.
  translated([&] {
    for (const Sending& one : sending) {
      for (const auto& completion : one) group_->engine_->wait(*completion);
    }
  });
}

}  // namespace smddp::process_group
