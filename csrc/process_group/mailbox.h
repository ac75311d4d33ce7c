// Messages of a header and tensors between the ranks of a group, for the pipelines of smddp.modelparallel.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "process_group/process_group.h"
#include "process_group/waiter.h"

namespace smddp::process_group {

// One stream to and from every other rank, in order; between streams there is no order. A message is an
// envelope of fixed size, and then what did not fit: the rest of it, and each large tensor, uncopied.
//
// A receive is posted on every stream from open() until the message that its sender called the last. One
// thread at a time takes; any thread sends and interrupts. What is sent must not change any more, and is held
// until it is gone. A stream that fails ends; the others go on.
class Mailbox {
 public:
  struct Arrival {
    int peer = 0;
    std::string head;
    std::vector<std::optional<at::Tensor>> tensors;
    bool last = false;
    std::string error;  // why the stream has failed; then there is nothing else
  };

  explicit Mailbox(c10::intrusive_ptr<ProcessGroup> group);

  // Begins to receive from all others; the streams of the last time must have ended.
  void open();
  // Whole messages that have come. With `block` it waits for one, or for interrupt().
  std::vector<Arrival> take(bool block);
  void interrupt() { waiter_.interrupt(); }
  // Returns at once. Without a tensor a place stays empty.
  void send(int peer, const std::string& head, std::vector<std::optional<at::Tensor>> tensors,
            bool last);
  // Waits until everything sent is gone, or cannot go any more.
  void flush();

 private:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // What one peer sends: first an envelope, then what it announces.
  struct Stream {
    explicit Stream(int peer) : peer(peer) {}
    int peer;
    at::Tensor envelope;
    std::vector<std::byte> front;
    at::Tensor rest;
    bool parsed = false;
    Arrival arriving;
    std::vector<WorkPtr> works;  // that have to end before it goes on
  };
  struct Sending {
    std::vector<at::Tensor> parts;
    std::vector<WorkPtr> works;
  };

  WorkPtr receive(int peer, at::Tensor bytes);
  void expectEnvelope(Stream& stream);
  // Takes what has come on a stream; false when it has ended.
  bool advance(Stream& stream, std::vector<Arrival>& arrived);
  // Reads the announcement, and posts what follows it.
  void parse(Stream& stream);

  const c10::intrusive_ptr<ProcessGroup> group_;
  Waiter waiter_;
  std::vector<Stream> streams_;  // that have not ended
  std::mutex mutex_;
  std::deque<Sending> sending_;  // guarded by mutex_
};

}  // namespace smddp::process_group
