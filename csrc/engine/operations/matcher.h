// Send and recv between two ranks of a group. Not a plan, because it is not known beforehand which ranks meet.
//
//   sender                               receiver
//   Announce(tag, id, bytes)   ────►     kept until a recv of this source and tag is posted
//                              ◄────     Accept(id)
//   data messages              ────►     in the order of the Accepts, straight into the buffer
//
// The messages of the transfer that is next in that order are posted, so that a transport can write them where they
// belong. A message travels only when its buffer is known, so nothing unexpected has to be stored, except buffered
// messages: those are part of their announcement, which has no answer; they have at most kMaxBuffered bytes, and are
// kept until a receive asks for them. So messages with different tags cannot block one another. Messages of one sender
// and one tag match in the order sent. Runs on the thread that owns the engine. An exception is the end of the group.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "common/ownership.h"
#include "engine/calls/buffer.h"
#include "engine/calls/completion.h"
#include "engine/calls/request.h"
#include "transport/channel.h"

namespace smddp::engine::operations {

// A send or a receive of this rank that has not ended.
struct Transfer {
  calls::Message message;
  calls::CompletionPtr completion;
  Deadline deadline;
  Nanoseconds submittedAt = 0;  // 0: it is not counted
  uint64_t id = 0;
  int64_t bytes = 0;
  int64_t moved = 0;       // handed to the channel, or taken out of it
  uint64_t lastPut = 0;    // number of its last data message
  bool oneRun = false;     // a receive: the sender's buffer is one run
  bool isMatched = false;  // both ranks have called
};

class Matcher {
 public:
  // The services of its group that the matcher uses.
  class Host {
   public:
    virtual ~Host() = default;
    virtual void sendControl(Rank to, transport::Bytes message) = 0;
    virtual transport::SendChannel& sendChannel(Rank to) = 0;
    virtual transport::ReceiveChannel& receiveChannel(Rank from) = 0;
    virtual void onComplete(Transfer& transfer) = 0;
    // True if control messages to this rank still wait for room.
    virtual bool backlogged(Rank to) = 0;
    // The number of a rank in texts.
    virtual Rank jobRank(Rank rank) const { return rank; }
  };

  // The longest message that is sent as buffered.
  static constexpr int64_t kMaxBuffered = 960;

  Matcher(const Ownership& ownership, Host& host, uint64_t group, Rank me)
      : ownership_(ownership), host_(host), group_(group), me_(me) {}

  void submit(Transfer transfer);
  // An Announce, Accept or Buffered (control_kind.h). False: it is of another kind, or malformed.
  bool onControl(Rank from, transport::Bytes message);
  // Moves data. True when anything advanced.
  bool advance();
  bool idle() const;
  // Takes back a receive that has no sender yet, and returns it. Empty if it has one, or has ended.
  std::optional<Transfer> withdraw(const calls::Completion& receive);
  // Every transfer that has not ended, for errors and deadlines.
  void forEach(const std::function<void(Transfer&)>& visit);
  // Nothing is written to the buffers of receives any more. Only clear() may follow.
  void abandon();
  void clear();

 private:
  struct Announced {
    uint64_t id;
    int32_t tag;
    int64_t bytes;
    bool
        oneRun;  // the sender's buffer is one run, so all data messages but the last fill their slot
    std::vector<std::byte> data = {};  // the contents of a buffered message
    bool buffered = false;
    size_t memory() const { return sizeof *this + data.size(); }
  };
  using Queue = std::deque<Transfer>;
  struct Incoming {
    bool empty() const { return queue.empty(); }
    Queue queue;  // accepted, in this order
    transport::ReceiveChannel* channel = nullptr;
  };

  void post(Transfer transfer);
  void onAnnounce(Rank from, Announced message);
  void accept(Rank from, Announced message, Transfer transfer);
  void sendBuffered(Transfer send);
  void onAccept(Rank from, uint64_t id);
  void sendToSelf(Transfer send);
  void copyToSelf(Transfer& send, Transfer& receive);
  bool pumpSend(Rank to, Queue& queue);
  void postMessages(const Incoming& incoming);
  bool pumpReceive(Rank from, Incoming& incoming);

  const Ownership& ownership_;
  Host& host_;
  const uint64_t group_;
  const Rank me_;
  uint64_t nextId_ = 1;
  std::deque<Transfer> posted_;                                  // receives without a sender yet
  std::map<Rank, std::deque<Announced>> announced_;              // messages without a receiver yet
  std::map<Rank, size_t> announcedBytes_;                        // their memory
  std::map<Rank, std::map<uint64_t, Transfer>> awaitingAccept_;  // our sends, not accepted yet
  std::map<Rank, Queue> sending_;
  std::map<Rank, Incoming> receiving_;
  std::deque<Transfer> toSelf_;   // our sends to ourselves, not received yet
  std::deque<Transfer> leaving_;  // buffered sends for which the transport has no room yet
};

}  // namespace smddp::engine::operations
