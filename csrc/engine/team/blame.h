// Says which rank is at fault when a rank waits. Often it is not the rank that is waited for: that one itself waits for
// another rank, for example on another node. So ranks that wait tell each other whom they blame, inside a node in
// shared memory (RegionHeader), between nodes by asking:
//
//   rank that waits                      rank that it waits for
//   Inquiry(my call, its number) ────►   compares the call with its own: Abort if they differ
//                                ◄────   Answer(whom it blames), or Left if it has left the group
//
// An engine answers within a quarter of a second whatever its process computes, so a rank that does not answer
// is stopped or cut off. But inquiries and answers travel behind the data between two ranks, and take as long as that
// does on a slow link. So a rank whose process answers on its lifeline (bootstrap/host_watch.h) is not silent.
//
// The first inquiry of a wait has another use. Two ranks in different calls may never exchange a message, because each
// expects the other to begin. The inquiry shows that their calls differ.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/types.h"
#include "engine/calls/control_kind.h"

namespace smddp::engine::team {

struct Blame {
  enum class Why : uint8_t {
    Unknown,      // it is waited for, nothing more is known
    NotCalled,    // it has not made the call yet; its last one was number `reached`
    Stopped,      // its process does not run (SIGSTOP, a debugger, a frozen container)
    Silent,       // it does not answer
    Unreachable,  // its host does not answer
  };
  Rank rank = -1;
  Why why = Why::Unknown;
  uint32_t reached = 0;

  // True if it ends the search: a rank that merely waits does not end it.
  bool definite() const { return rank >= 0 && why != Why::Unknown; }
  // For a word in shared memory and for messages; 0 is nobody.
  uint64_t pack() const;
  // Nobody, if no rank of a group of this size can have packed the number.
  static Blame unpack(uint64_t packed, int size);
  // "has not made this call yet (its last is #4)"; empty when unknown.
  std::string describe() const;
};

// Another group of a rank has failed. If the rank makes no further call of this one, that is why: a job that ends
// because of one rank ends in many groups, and ranks that have nothing to do with that rank hear of it through others.
struct Trouble {
  uint64_t calls = 0;  // the calls of this group that the rank had made before
  std::string text;    // the text for the user of that rank, without the consequences
};

//   byte  0               8               16              24                              40
//         | header        | group         | sequence      | call                          |
struct InquiryMessage {
  transport::ControlHeader header{.kind = calls::kInquiry};
  uint64_t group = 0;
  uint64_t sequence = 0;  // 0: waits in send or recv, there is no call to compare
  transport::CallFingerprint call;
};
static_assert(sizeof(InquiryMessage) == 40 && std::is_trivially_copyable_v<InquiryMessage>);

//   byte  0               8               16              24
//         | header        | group         | blame         |
struct AnswerMessage {
  transport::ControlHeader header{.kind = calls::kAnswer};
  uint64_t group = 0;
  uint64_t blame = 0;
};
static_assert(sizeof(AnswerMessage) == 24 && std::is_trivially_copyable_v<AnswerMessage>);

//   byte  0               8               16              24
//         | header        | group         | calls         |
struct LeftMessage {
  transport::ControlHeader header{.kind = calls::kLeft};
  uint64_t group = 0;
  uint64_t calls = 0;  // how many it has made
};
static_assert(sizeof(LeftMessage) == 24 && std::is_trivially_copyable_v<LeftMessage>);

//   byte  0               8               16              24
//         | header        | group         | calls         | text …
struct TroubleMessage {
  transport::ControlHeader header{.kind = calls::kTrouble};
  uint64_t group = 0;
  uint64_t calls = 0;
};
static_assert(sizeof(TroubleMessage) == 24 && std::is_trivially_copyable_v<TroubleMessage>);
std::vector<std::byte> makeTrouble(uint64_t group, const Trouble& trouble);
std::optional<Trouble> parseTrouble(transport::Bytes message);

std::optional<InquiryMessage> parseInquiry(transport::Bytes message);
std::optional<AnswerMessage> parseAnswer(transport::Bytes message);
std::optional<LeftMessage> parseLeft(transport::Bytes message);

// Keeps the answers of ranks of other nodes, and since when one of them owes an answer. Used by the thread that owns
// the engine.
class Inquiries {
 public:
  // A rank that owes an answer for longer than this may be silent.
  static constexpr Nanoseconds kSilence = 1'000'000'000;

  void asked(Rank rank, Nanoseconds now);
  void answered(Rank rank, const Blame& blame);
  // Keeps what is known about ranks that are still waited for.
  template <typename Awaited>
  void keepOnly(const Awaited& awaited) {
    std::erase_if(entries_, [&](const auto& entry) { return !awaited.contains(entry.first); });
  }
  // Returns the blame that `rank` has told, if that ends the search; else one on `rank` itself.
  Blame of(Rank rank) const;
  bool isSilent(Rank rank, Nanoseconds now) const;

 private:
  struct Entry {
    std::optional<Nanoseconds> unansweredSince;
    Blame blame;
  };
  std::map<Rank, Entry> entries_;
};

}  // namespace smddp::engine::team
