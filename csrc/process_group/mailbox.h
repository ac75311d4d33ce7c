// Messages of a header and tensors between the ranks of a group, for the pipelines of smddp.modelparallel.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/completion.h"
#include "process_group/process_group.h"

namespace smddp::process_group {

// One stream to and from every other rank, in order; between streams there is no order. A message is an
// envelope of fixed size, and then what did not fit: the rest of it, and each large tensor, uncopied. Short
// messages are buffered: they are there when somebody asks, and need nobody's help to get there.
//
// Receives are posted by take() and, as far as nobody has answered them, taken back when it returns: so a rank
// that computes has nothing under way that would wake its progress thread. Who takes looks again and again for a
// while before it sleeps: most answers come sooner than a process wakes. A stream begins with open() and ends
// with the message that its sender called the last. One thread at a time takes; any thread sends and interrupts.
// What is sent must not change any more, and is held until it is gone. A stream that fails ends; the others go on.
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
  // Ends the take() that waits, or else the next one.
  void interrupt();
  // Returns at once. Without a tensor a place stays empty.
  void send(int peer, const std::string& head,
            const std::vector<std::optional<at::Tensor>>& tensors, bool last);
  // Waits until everything sent is gone, or cannot go any more.
  void flush();

 private:
  // What one peer sends: first an envelope, then what it announces.
  struct Stream {
    explicit Stream(int peer) : peer(peer) {}
    int peer;
    at::Tensor front;  // the envelope, and the rest of it
    enum { Envelope, Rest, Tensors } expects = Envelope;
    Arrival arriving;
    std::vector<engine::CompletionPtr> receives;  // that have to end before it goes on
  };
  using Sending = std::vector<engine::CompletionPtr>;

  engine::CompletionPtr submit(bool send, int peer, at::Tensor bytes, bool buffered);
  // Begins to receive the parts of what is as long as `front`, from its part number `first` on.
  void receiveFront(Stream& stream, int64_t first);
  // Until a stream can go on, or somebody interrupts.
  void waitForStreams();
  // Takes what has come on a stream; false when it has ended.
  bool advance(Stream& stream, std::vector<Arrival>& arrived);
  // Reads what has come of a front, and begins to receive what follows it.
  void readEnvelope(Stream& stream);
  void readFront(Stream& stream);
  void withdraw();

  const c10::intrusive_ptr<ProcessGroup> group_;
  std::atomic<bool> interrupted_{false};
  std::vector<Stream> streams_;  // that have not ended
  std::mutex mutex_;
  std::deque<Sending> sending_;  // guarded by mutex_
};

}  // namespace smddp::process_group
