// One TCP connection: a queue of frames to send, and the parser of those that arrive.
//
// Payloads leave from where they lie, and puts arrive where they belong: between the socket and these places no byte is
// copied, except up to kReadAhead that a read for a header brings along. One system call sends several frames, and
// receives the rest of one and the head of the next.
//
// Threads: that of the transport. Owns the socket. A connection that has failed says why, and does nothing any more.
#pragma once

#include <sys/uio.h>

#include <array>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/file_descriptor.h"
#include "transport/tcp/frames.h"
#include "transport/transport.h"

namespace smddp::transport::tcp {

// A connection calls this while it receives: asks where bytes belong, and tells what has come.
class Receiver {
 public:
  virtual ~Receiver() = default;
  // The slot for a put, header and payload; empty if the peer must not write there.
  virtual std::span<std::byte> slotFor(const FrameHeader& frame) = 0;
  // Where else its payload of that length belongs; empty: into its slot.
  virtual std::span<std::byte> placeFor(const FrameHeader& frame, size_t payloadBytes) = 0;
  virtual void onControlFrame(Bytes message) = 0;
  virtual void onPutFrame(const FrameHeader& frame) = 0;
};

class Connection {
 public:
  explicit Connection(FileDescriptor socket) : socket_(std::move(socket)) {}
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  int descriptor() const { return socket_.get(); }
  // Empty while all is well.
  const std::string& failure() const { return failure_; }

  // Sending. Frames are sent in order, by send().
  bool hasRoom() const { return queue_.size() < kMaxQueued; }
  void queueHello(const Hello& hello);
  void queueControl(Bytes message);
  void queuePut(const RemoteSlot& slot, uint32_t immediate, Bytes header, Bytes payload,
                uint64_t token);
  // Sends what the socket takes, if it may take something. Appends the tokens of puts that have left.
  void send(std::vector<uint64_t>& done);
  bool hasQueued() const { return !queue_.empty(); }
  uint64_t bytesSent() const { return bytesSent_; }
  // Whether the other host has acknowledged all of it.
  bool isDelivered() const;

  // The kernel says that the socket takes bytes, or has some.
  void markWritable() { isWritable_ = true; }
  void markReadable() { isReadable_ = true; }
  // The other end sends nothing any more after what has arrived.
  void markEnding() { isEnding_ = isReadable_ = true; }
  bool isWritable() const { return isWritable_; }

  // Receives at most about kTurn bytes. True: there may be more.
  bool receive(Receiver& receiver);
  // If a payload is arriving in this memory, its rest goes to its slot.
  void withdraw(std::span<std::byte> memory);
  // Receives the Hello with which the other end begins. False: it is not there yet.
  bool receiveHello(Hello& hello);

 private:
  static constexpr size_t kMaxQueued = 64;
  static constexpr size_t kReadAhead = 2048;
  // After so many bytes another peer has its turn.
  static constexpr size_t kTurn = 1 << 20;

  struct Outgoing {
    std::vector<std::byte> head;    // everything but a payload
    Bytes payload;                  // of a put
    std::optional<uint64_t> token;  // of a put
    size_t sent = 0;
    size_t bytes() const { return head.size() + payload.size(); }
  };

  // Queues a head of these two pieces.
  Outgoing& queue(Bytes first, Bytes second);
  void fail(const std::string& what, int error);
  // Reads into the pieces. Returns the number of bytes; 0 if there are none, or an error.
  size_t read(std::span<iovec> pieces);
  // Reads the rest of the frame, and behind it into buffer_, which is empty.
  size_t readFrame();
  // Reads more bytes into buffer_.
  size_t readBuffer();
  // Moves bytes from buffer_ to the start of `place`, which becomes the rest of it.
  void takeBuffered(std::span<std::byte>& place);
  bool beginFrame(Receiver& receiver);

  FileDescriptor socket_;
  std::string failure_;
  // Why nothing can be sent any more. It becomes failure_ when all that has arrived is received.
  std::string sendFailure_;
  std::deque<Outgoing> queue_;
  uint64_t bytesSent_ = 0;
  bool isWritable_ = true;
  bool isReadable_ = true;
  bool isEnding_ = false;

  // Received, and not yet used.
  std::array<std::byte, kReadAhead> buffer_;
  size_t begin_ = 0, end_ = 0;
  // The frame that is arriving.
  bool isInFrame_ = false;
  FrameHeader frame_;
  std::span<std::byte> head_;     // the rest of a put's header
  std::span<std::byte> place_;    // the rest of its payload, or of a control message
  std::span<std::byte> payload_;  // where the payload lies in the slot
  std::array<std::byte, kMaxControlBytes> control_;
};

}  // namespace smddp::transport::tcp
