#include "process_group/mailbox.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>
#include <span>

#include "process_group/errors.h"

namespace smddp::process_group {

namespace {

constexpr size_t kEnvelope = 8192;
// Below this a tensor is copied into the envelope, as long as that is half empty; above, it travels alone.
constexpr size_t kInline = 4096;

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

// The memory of a dense tensor as bytes, shared.
at::Tensor bytesOf(const at::Tensor& tensor) {
  auto bytes = newTensor({0}, at::kByte);
  bytes.unsafeGetTensorImpl()->set_storage_and_dtype(tensor.storage(), bytes.dtype());
  bytes.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset() *
                                                  static_cast<int64_t>(tensor.element_size()));
  bytes.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(tensor.nbytes())});
  return bytes;
}

// A tensor as dense host memory; usually itself.
at::Tensor sendable(const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.is_meta(),
              "a parameter that lives on another rank cannot be sent from this one");
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided && !tensor.is_quantized(),
                   "smp cannot send tensors of ", tensor.dtype(), ", ", tensor.layout(),
                   " between ranks");
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

}  // namespace

Mailbox::Mailbox(c10::intrusive_ptr<ProcessGroup> group) : group_(std::move(group)) {}

void Mailbox::open() {
  const c10::InferenceMode guard(false);
  std::vector<Stream> streams;
  for (int peer = 0; peer < group_->getSize(); ++peer) {
    if (peer == group_->getRank()) continue;
    expectEnvelope(streams.emplace_back(peer));
  }
  streams_ = std::move(streams);
}

Mailbox::WorkPtr Mailbox::receive(int peer, at::Tensor bytes) {
  std::vector<at::Tensor> tensors{std::move(bytes)};
  return group_->recv(tensors, peer, 0);
}

void Mailbox::expectEnvelope(Stream& stream) {
  stream.envelope = newBytes(kEnvelope);
  stream.front.clear();
  stream.parsed = false;
  stream.arriving = Arrival{stream.peer, {}, {}, false, {}};
  stream.works = {receive(stream.peer, stream.envelope)};
}

std::vector<Mailbox::Arrival> Mailbox::take(bool block) {
  const c10::InferenceMode guard(false);
  std::vector<Arrival> arrived;
  while (!streams_.empty()) {
    std::erase_if(streams_, [&](Stream& stream) { return !advance(stream, arrived); });
    if (!arrived.empty() || !block) break;
    std::vector<c10d::Work*> works;
    for (const Stream& stream : streams_) {
      for (const auto& work : stream.works) {
        if (!work->isCompleted()) works.push_back(work.get());
      }
    }
    // One that has ended between the two looks needs no waiting.
    const bool all = std::all_of(streams_.begin(), streams_.end(), [](const Stream& stream) {
      return std::any_of(stream.works.begin(), stream.works.end(),
                         [](const auto& work) { return !work->isCompleted(); });
    });
    if (all && waiter_.wait(works, /*block=*/true).empty()) break;
  }
  return arrived;
}

bool Mailbox::advance(Stream& stream, std::vector<Arrival>& arrived) {
  const auto ended = [](const WorkPtr& work) { return work->isCompleted(); };
  try {
    while (std::all_of(stream.works.begin(), stream.works.end(), ended)) {
      for (const auto& work : std::exchange(stream.works, {})) work->wait();
      if (!stream.parsed) {
        parse(stream);
        continue;
      }
      const bool last = stream.arriving.last;
      arrived.push_back(std::move(stream.arriving));
      if (last) return false;
      expectEnvelope(stream);
    }
    return true;
  } catch (const std::exception& error) {
    arrived.push_back({stream.peer, {}, {}, true, error.what()});
    return false;
  }
}

void Mailbox::parse(Stream& stream) {
  const auto* data = static_cast<const std::byte*>(stream.envelope.const_data_ptr());
  const auto front = Reader({data, kEnvelope}).value<Front>();
  if (front.total > kEnvelope && !stream.rest.defined()) {
    stream.rest = newBytes(front.total - kEnvelope);
    stream.works = {receive(stream.peer, stream.rest)};
    return;
  }
  stream.front.assign(data, data + std::min<size_t>(front.total, kEnvelope));
  if (stream.rest.defined()) {
    const auto* more = static_cast<const std::byte*>(stream.rest.const_data_ptr());
    stream.front.insert(stream.front.end(), more, more + stream.rest.nbytes());
    stream.rest.reset();
  }
  Reader reader(stream.front);
  reader.value<Front>();
  const auto head = reader.raw(front.head);
  Arrival& arrival = stream.arriving;
  arrival.head.assign(reinterpret_cast<const char*>(head.data()), head.size());
  arrival.last = front.last != 0;
  std::vector<std::pair<size_t, at::Tensor>> inside;
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
      stream.works.push_back(receive(stream.peer, bytesOf(*place)));
    }
    place->set_requires_grad(about.requiresGrad != 0);
  }
  stream.parsed = true;
}

void Mailbox::send(int peer, const std::string& head,
                   std::vector<std::optional<at::Tensor>> tensors, bool last) {
  const c10::InferenceMode guard(false);
  Writer writer;
  Front front{static_cast<uint32_t>(head.size()), static_cast<uint32_t>(tensors.size()), 0, last};
  writer.value(front);
  writer.raw(head.data(), head.size());
  Sending sending;
  sending.parts.emplace_back();
  size_t room = kEnvelope / 2;
  for (const auto& tensor : tensors) {
    Description about;
    if (!tensor) {
      writer.value(about);
      continue;
    }
    const at::Tensor data = sendable(*tensor);
    const bool inside = data.nbytes() <= std::min(kInline, room);
    about = {inside ? Description::Inside : Description::Alone,
             static_cast<int8_t>(data.scalar_type()), tensor->requires_grad(),
             static_cast<uint8_t>(data.dim())};
    writer.value(about);
    for (const int64_t size : data.sizes()) writer.value(size);
    if (inside) {
      room -= data.nbytes();
      writer.raw(data.const_data_ptr(), data.nbytes());
    } else {
      sending.parts.push_back(bytesOf(data));
    }
  }
  auto& bytes = writer.bytes();
  front.total = static_cast<uint32_t>(bytes.size());
  std::memcpy(bytes.data(), &front, sizeof(front));
  sending.parts[0] = newBytes(kEnvelope);
  std::memcpy(sending.parts[0].mutable_data_ptr(), bytes.data(), std::min(bytes.size(), kEnvelope));
  if (bytes.size() > kEnvelope) {
    auto rest = newBytes(bytes.size() - kEnvelope);
    std::memcpy(rest.mutable_data_ptr(), bytes.data() + kEnvelope, bytes.size() - kEnvelope);
    sending.parts.insert(sending.parts.begin() + 1, std::move(rest));
  }
  const auto gone = [](const Sending& one) {
    return std::all_of(one.works.begin(), one.works.end(),
                       [](const auto& work) { return work->isCompleted(); });
  };
  // The parts of two messages must not mix.
  const std::lock_guard lock(mutex_);
  while (!sending_.empty() && gone(sending_.front())) sending_.pop_front();
  for (const at::Tensor& part : sending.parts) {
    std::vector<at::Tensor> list{part};
    sending.works.push_back(group_->send(list, peer, 0));
  }
  if (!gone(sending)) sending_.push_back(std::move(sending));
}

void Mailbox::flush() {
  std::deque<Sending> sending;
  {
    const std::lock_guard lock(mutex_);
    sending.swap(sending_);
  }
  for (const auto& one : sending) {
    for (const auto& work : one.works) {
      try {
        work->wait();
      } catch (const std::exception&) {
        // To a peer that is gone: its stream has failed as well, and says so.
      }
    }
  }
}

}  // namespace smddp::process_group
