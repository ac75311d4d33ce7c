// Runs the agreement on the members of a group (engine/agreement) on the thread that calls it: over notes between the
// processes, which need no group, and with what this process knows of the others' deaths and silences.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "engine/agreement/agreement.h"
#include "engine/meeting_point.h"

namespace smddp::engine {

// A member's card is its handle, and its id the handle's mailbox. Used by one thread at a time, which is not the
// engine's owner. The meeting point outlives it.
class MemberAgreement {
 public:
  MemberAgreement(MeetingPoint& point, const std::string& card, Nanoseconds grace);

  // The first generation; the members know one another.
  void begin(agreement::Generation first) { agreement_.begin(std::move(first)); }
  static agreement::Member memberOf(const bootstrap::Handle& handle, const std::string& card) {
    return {handle.mailbox, card};
  }
  // A process with this card wants to become a member. The next generation has it. Throws Usage if this is no card.
  void hear(const std::string& card);
  // Returns how many newcomers wait. Answers members that are behind; messages of an agreement wait for agree().
  size_t numNewcomers();
  // Blocks until a generation has been agreed on that is newer than the current one, or this process is out: see
  // state(). Throws Timeout, and what checkInterrupt() throws.
  void agree(int64_t committed, int64_t voted, Nanoseconds timeout);
  // Blocks until this process is a member. `members`: those of now. Throws PeerLost if all are lost, and as agree().
  void join(const std::vector<agreement::Member>& members, Nanoseconds timeout);
  const agreement::Agreement& state() const { return agreement_; }
  // The members of the current generation.
  std::vector<bootstrap::Handle> handles();
  // "rank 2 (pid 40122 on ip-10-0-1-7)", as of that generation.
  std::string describe(const agreement::Generation& generation, agreement::MemberId id);

 private:
  const bootstrap::Handle& handleOf(const std::string& card);
  // Null if it cannot be reached.
  const process::Peer* peerOf(const agreement::Member& member);
  // Both on the owner.
  void receive();
  void lookForLosses(Nanoseconds now);
  void send();
  void run(Nanoseconds timeout);

  MeetingPoint& point_;
  const std::string card_;
  agreement::Agreement agreement_;
  std::map<std::string, bootstrap::Handle> handles_;  // by card
  std::map<agreement::MemberId, const process::Peer*> peers_;
  std::map<agreement::MemberId, Nanoseconds> stoppedSince_;
  std::deque<std::pair<agreement::MemberId, agreement::Message>> inbox_;
};

}  // namespace smddp::engine
