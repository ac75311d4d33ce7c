#include "transport/tcp/connection.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "transport/wire.h"

namespace smddp::transport::tcp {
namespace {

// One call sends at most so many frames. Two pieces each.
constexpr size_t kFramesPerCall = 16;

}  // namespace

void Connection::fail(const std::string& what, int error) {
  failure_ = error == 0 ? what : fmt::format("{}: {}", what, std::strerror(error));
  queue_.clear();
}

Connection::Outgoing& Connection::queue(Bytes first, Bytes second) {
  Outgoing& out = queue_.emplace_back();
  out.head.reserve(first.size() + second.size());
  out.head.assign(first.begin(), first.end());
  out.head.insert(out.head.end(), second.begin(), second.end());
  return out;
}

void Connection::queueHello(const Hello& hello) { queue(bytesOf(hello), {}); }

void Connection::queueControl(Bytes message) {
  const FrameHeader frame{FrameKind::Control, 0, message.size(), {}};
  queue(bytesOf(frame), message);
}

void Connection::queuePut(const RemoteSlot& slot, uint32_t immediate, Bytes header, Bytes payload,
                          uint64_t token) {
  const FrameHeader frame{FrameKind::Put, immediate, kHeaderBytes + payload.size(), slot};
  Outgoing& out = queue(bytesOf(frame), header);
  out.payload = payload;
  out.token = token;
}

void Connection::send(std::vector<uint64_t>& done) {
  while (isWritable_ && failure_.empty() && !queue_.empty()) {
    std::array<iovec, 2 * kFramesPerCall> pieces;
    size_t count = 0, total = 0;
    for (size_t i = 0; i < std::min(kFramesPerCall, queue_.size()); ++i) {
      const Outgoing& out = queue_[i];
      size_t skip = out.sent;
      const auto add = [&](Bytes bytes) {
        const size_t skipped = std::min(skip, bytes.size());
        skip -= skipped;
        bytes = bytes.subspan(skipped);
        if (bytes.empty()) return;
        pieces[count++] = {const_cast<std::byte*>(bytes.data()), bytes.size()};
        total += bytes.size();
      };
      add(out.head);
      add(out.payload);
    }
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = count;
    const ssize_t sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOTCONN) {
        isWritable_ = false;
        return;
      }
      // The connection ends when everything that has arrived has been received.
      sendFailure_ = fmt::format("sending to it failed: {}", std::strerror(errno));
      queue_.clear();
      isWritable_ = false;
      return markEnding();
    }
    // The socket has taken all that it has room for.
    isWritable_ = static_cast<size_t>(sent) == total;
    bytesSent_ += static_cast<uint64_t>(sent);
    for (auto left = static_cast<size_t>(sent); left > 0;) {
      Outgoing& out = queue_.front();
      const size_t part = std::min(left, out.bytes() - out.sent);
      out.sent += part;
      left -= part;
      if (out.sent < out.bytes()) break;
      if (out.token) done.push_back(*out.token);
      queue_.pop_front();
    }
  }
}

bool Connection::isDelivered() const {
  int bytes = 0;
  return queue_.empty() && (::ioctl(socket_.get(), SIOCOUTQ, &bytes) != 0 || bytes == 0);
}

size_t Connection::read(std::span<iovec> pieces) {
  size_t wanted = 0;
  for (const iovec& piece : pieces) wanted += piece.iov_len;
  msghdr message{};
  message.msg_iov = pieces.data();
  message.msg_iovlen = pieces.size();
  ssize_t got = 0;
  do {
    got = ::recvmsg(socket_.get(), &message, MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  if (got > 0) {
    // Fewer bytes than there is room for: there are no more.
    isReadable_ = static_cast<size_t>(got) == wanted || isEnding_;
    return static_cast<size_t>(got);
  }
  isReadable_ = false;
  if (got == 0) {
    fail("it has closed the connection", 0);
  } else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != ENOTCONN) {
    fail("receiving from it failed", errno);
  }
  return 0;
}

size_t Connection::readFrame() {
  std::array<iovec, 3> pieces{{{head_.data(), head_.size()},
                               {place_.data(), place_.size()},
                               {buffer_.data(), buffer_.size()}}};
  const size_t got = read(pieces);
  size_t left = got;
  for (auto* part : {&head_, &place_}) {
    const size_t filled = std::min(left, part->size());
    *part = part->subspan(filled);
    left -= filled;
  }
  begin_ = 0;
  end_ = left;
  return got;
}

size_t Connection::readBuffer() {
  // A part of a header may be there.
  std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
  end_ -= std::exchange(begin_, 0);
  iovec piece{buffer_.data() + end_, buffer_.size() - end_};
  const size_t got = read({&piece, 1});
  end_ += got;
  return got;
}

void Connection::takeBuffered(std::span<std::byte>& place) {
  const size_t count = std::min(place.size(), end_ - begin_);
  if (count > 0) std::memcpy(place.data(), buffer_.data() + begin_, count);
  begin_ += count;
  place = place.subspan(count);
}

bool Connection::receiveHello(Hello& hello) {
  while (end_ - begin_ < sizeof hello && isReadable_ && failure_.empty()) readBuffer();
  if (end_ - begin_ < sizeof hello) return false;
  std::span<std::byte> place = std::as_writable_bytes(std::span(&hello, 1));
  takeBuffered(place);
  return true;
}

// Takes the header of the next frame from the buffer. False: the peer has broken the protocol.
bool Connection::beginFrame(Receiver& receiver) {
  std::span<std::byte> header = std::as_writable_bytes(std::span(&frame_, 1));
  takeBuffered(header);
  isInFrame_ = true;
  if (frame_.kind == FrameKind::Control && frame_.length <= control_.size()) {
    place_ = std::span(control_).first(frame_.length);
    return true;
  }
  const bool isPut = frame_.kind == FrameKind::Put && frame_.immediate <= kMaxImmediate &&
                     frame_.length >= kHeaderBytes;
  const std::span<std::byte> slot = isPut ? receiver.slotFor(frame_) : std::span<std::byte>();
  if (!isPut || slot.size() != frame_.length) {
    fail("it has sent what is no message of smddp", 0);
    return false;
  }
  head_ = slot.first(kHeaderBytes);
  place_ = payload_ = slot.subspan(kHeaderBytes);
  const std::span<std::byte> elsewhere = receiver.placeFor(frame_, payload_.size());
  if (!elsewhere.empty()) place_ = elsewhere;
  return true;
}

void Connection::withdraw(std::span<std::byte> memory) {
  const bool isThere =
      place_.data() >= memory.data() && place_.data() < memory.data() + memory.size();
  // Example: of a payload of 100 bytes, 40 are to come. They go to the last 40 bytes of its slot.
  if (isInFrame_ && isThere) place_ = payload_.last(place_.size());
}

bool Connection::receive(Receiver& receiver) {
  size_t received = 0;
  while (failure_.empty()) {
    // Use up what is there.
    for (;;) {
      if (!isInFrame_) {
        if (end_ - begin_ < sizeof frame_) break;
        if (!beginFrame(receiver)) return false;
      }
      takeBuffered(head_);
      takeBuffered(place_);
      if (!head_.empty() || !place_.empty()) break;
      isInFrame_ = false;
      if (frame_.kind == FrameKind::Put) {
        receiver.onPutFrame(frame_);
      } else {
        receiver.onControlFrame(Bytes(control_).first(frame_.length));
      }
    }
    if (!isReadable_) {
      if (!sendFailure_.empty()) failure_ = sendFailure_;
      return false;
    }
    if (received >= kTurn) return true;
    received += isInFrame_ ? readFrame() : readBuffer();
  }
  return false;
}

}  // namespace smddp::transport::tcp
