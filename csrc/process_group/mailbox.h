// Carries messages between the ranks of a group, for the pipelines of smddp.modelparallel. The format of a message is
// in message_codec.h.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/calls/completion.h"
#include "process_group/process_group.h"

namespace smddp::process_group {

// There is one stream per ordered pair of ranks of the group, for the whole job. open() begins a step on it, and the
// message marked `last` ends that step. Messages of a stream arrive in order; between streams there is no order.
//
// A message begins with a *front* (message_codec.h). It travels as one or more messages of the engine (here: engine
// messages). The first, the *envelope*, has a fixed size and is the beginning of the front; the rest of the front and
// the large tensors follow in others. Short fronts are sent buffered: they arrive even if the receiver does nothing.
//
// take() posts the receives and, before it returns, withdraws the receives of messages that have not begun to arrive.
// Only a message of which a part has come keeps its receives. So while a rank computes, messages seldom wake its
// progress thread. take() polls for a while before it sleeps, because most answers come sooner than a sleeping thread
// wakes.
//
// One thread at a time may call take(), and none during open(); any thread may call send() and interrupt(). The mailbox
// keeps what is sent alive until it has left; the caller must not change it before. A step also ends on a stream that
// fails, with an Arrival that says why; the other streams go on.
class Mailbox {
 public:
  struct Arrival {
    int peer = 0;
    std::string header;
    std::vector<std::optional<at::Tensor>> tensors;
    bool last = false;
    // Why the stream has failed, as torch's exception: then `last` is true, and there is neither header nor tensor.
    std::exception_ptr error;
  };

  explicit Mailbox(c10::intrusive_ptr<ProcessGroup> group);

  // Begins a step on the streams from all other ranks. The last step must have ended on all of them.
  void open();
  // Returns the messages that have arrived completely. With `block` it waits for one, or for interrupt(), unless the
  // step has ended on all streams.
  std::vector<Arrival> take(bool block);
  // Ends the take() that waits, or else the next one.
  void interrupt();
  // Returns at once. `last` ends the step on the stream to that peer.
  void send(int peer, const std::string& header,
            const std::vector<std::optional<at::Tensor>>& tensors, bool last);
  // Waits until everything that was sent before has left, or has failed.
  void flush();

 private:
  // The stream from one peer, in a step. It expects an envelope, then the rest of the front, then the large tensors.
  struct Stream {
    explicit Stream(int peer) : peer(peer) {}
    int peer;
    at::Tensor front;  // only as long as the envelope, while that is expected
    enum { Envelope, Rest, Tensors } expects = Envelope;
    Arrival arriving;
    std::vector<engine::calls::CompletionPtr>
        receives;  // of what is expected; they end in this order
  };
  using Sending = std::vector<engine::calls::CompletionPtr>;

  engine::calls::CompletionPtr submit(bool send, int peer, at::Tensor bytes, bool buffered);
  // Posts receives for the parts of the front, from number `first` on.
  void receiveFront(Stream& stream, int64_t first);
  // Waits until something has arrived on a stream, or interrupt() is called.
  void waitForStreams();
  // Appends the messages that have arrived on a stream; returns false when the step has ended on it.
  bool advance(Stream& stream, std::vector<Arrival>& arrived);
  // Read a part of the front that has arrived, and post receives for what follows it.
  void readEnvelope(Stream& stream);
  void readFront(Stream& stream);
  void withdraw();

  const c10::intrusive_ptr<ProcessGroup> group_;
  std::atomic<bool> interrupted_{false};
  std::vector<Stream> streams_;  // on which the step has not ended
  std::mutex mutex_;
  std::deque<Sending> sending_;  // guarded by mutex_
};

}  // namespace smddp::process_group
