// Makes a group of processes that know one another's handles (bootstrap/handle.h), which the caller has brought to all
// of them: without a store, and without a group that they are in. So the members of a process group can change.
#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bootstrap/locality.h"
#include "common/log.h"
#include "engine/calls/break.h"
#include "engine/groups/meeting.h"
#include "engine/meeting_point.h"

namespace smddp::engine {

using bootstrap::MeetingNote;

// Every member sends each other one its entry, and when it has joined, that it has. Each sends one note in each round,
// or instead why it cannot; who gets that gives up, too.
//
// Notes of an earlier try may still come: they have another uuid.
class PeerMeeting final : public groups::Meeting {
 public:
  // The arguments outlive the meeting.
  PeerMeeting(MeetingPoint& point, const groups::GroupSpec& spec,
              const std::vector<bootstrap::Handle>& members, int64_t uuid, Nanoseconds timeout)
      : point_(point),
        engine_(point.engine()),
        members_(members),
        uuid_(uuid),
        me_(static_cast<size_t>(spec.me)),
        timeout_(timeout),
        digest_(bootstrap::digestOf(members)),
        peers_(members.size()),
        otherUuids_(members.size()) {
    for (size_t rank = 0; rank < members.size(); ++rank) {
      introductions_.push_back(members[rank].introduction);
      introductions_.back().jobRank = static_cast<Rank>(rank);
    }
  }

  groups::Members exchange(const bootstrap::Introduction& mine) override {
    groups::Members members;
    members.nodeOfRank = meetPeers();
    send({.round = ++round_, .entry = mine.group});
    wait();
    members.introductions = introductions_;
    for (size_t rank = 0; rank < peers_.size(); ++rank) {
      members.introductions[rank].group = rank == me_ ? mine.group : notes_.at(rank).entry;
    }
    return members;
  }

  void complete() override {
    send({.round = ++round_});
    wait();
  }

  Error tell(const Error& error) noexcept override {
    if (std::exchange(othersKnow_, true)) return error;
    try {
      if (round_ == 0) meetPeers();
      const std::string me = bootstrap::describeThisProcess(introductions_[me_].jobRank);
      const bool isNamed = std::string_view(error.what()).find(me) != std::string_view::npos;
      send({.round = round_,
            .errorKind = static_cast<uint32_t>(error.kind()),
            .text =
                isNamed ? error.what() : fmt::format("{} cannot take part: {}", me, error.what())});
    } catch (const std::exception& failure) {
      SMDDP_LOG(Debug, "engine", "no other rank hears of \"{}\": {}", error.what(), failure.what());
    }
    return error;
  }

 private:
  // Connects to the other members. Returns the name of each one's node.
  std::vector<std::string> meetPeers() {
    bootstrap::checkAgreement(introductions_);
    process::Process& process = engine_.process();
    point_.mapMates(introductions_);
    const std::vector<bootstrap::ProbeReport> nothingFailed(introductions_.size());
    const auto locality =
        bootstrap::decideLocality(introductions_, nothingFailed, static_cast<Rank>(me_));
    engine_.progress().call([&] {
      for (size_t rank = 0; rank < peers_.size(); ++rank) {
        if (rank == me_) continue;
        const bool sharesNode = locality.nodeOfRank[rank] == locality.nodeOfRank[me_];
        peers_[rank] = &process.meet(introductions_[rank], sharesNode);
      }
      process.setNodeAgreement(locality.agreement);
    });
    return locality.nodeOfRank;
  }

  void send(MeetingNote note) {
    note.uuid = uuid_;
    note.digest = digest_;
    const auto blob = bootstrap::serialise(note);
    engine_.progress().call([&] {
      for (size_t rank = 0; rank < peers_.size(); ++rank) {
        if (peers_[rank] == nullptr) continue;
        point_.send(*peers_[rank], members_[rank].mailbox, MeetingPoint::Topic::Change, blob);
      }
    });
  }

  // Waits until all members have sent their note of this round, and can tell when one another is gone.
  void wait() {
    std::optional<Deadline> deadline;
    point_.waitUntil([&] {
      process::Process& process = engine_.process();
      if (!deadline) deadline = Deadline::after(process.clock(), timeout_);
      takeNotes();
      if (missing().empty() && process.peers().unconnectedAmong(introductions_).empty())
        return true;
      checkPeers(process.peers());
      if (deadline->passed(process.clock())) raiseMissing(process.peers());
      return false;
    });
  }

  // Reads those of this change. Some may be of its next round: their senders have all of this one.
  void takeNotes() {
    for (const auto& note : point_.take(MeetingPoint::Topic::Change)) {
      if (point_.changeNotes_.size() >= MeetingPoint::kMaxNotes) break;
      point_.changeNotes_.push_back({note.from, bootstrap::parseNote(note.bytes)});
    }
    std::erase_if(point_.changeNotes_, [this](const auto& note) {
      return note.note.uuid != uuid_ && point_.usedUuids_.contains(note.note.uuid);
    });
    // Before one of them ends this meeting: the next one reads the others.
    const auto rankOf = [this](const MeetingPoint::ChangeNote& note) {
      return static_cast<size_t>(std::ranges::find(peers_, note.from) - peers_.begin());
    };
    const auto ofOthers = [&](const MeetingPoint::ChangeNote& note) {
      return note.note.uuid != uuid_ || rankOf(note) == peers_.size();
    };
    const auto first =
        std::stable_partition(point_.changeNotes_.begin(), point_.changeNotes_.end(), ofOthers);
    std::deque<MeetingPoint::ChangeNote> mine(std::make_move_iterator(first),
                                              std::make_move_iterator(point_.changeNotes_.end()));
    point_.changeNotes_.erase(first, point_.changeNotes_.end());
    for (const auto& note : point_.changeNotes_) {
      if (rankOf(note) < peers_.size()) otherUuids_[rankOf(note)] = note.note.uuid;
    }
    for (auto& note : mine) read(rankOf(note), std::move(note.note));
  }

  void read(size_t rank, MeetingNote note) {
    if (note.digest != digest_) {
      raise(ErrorKind::Mismatch,
            "{} and {} change the members to different ones under the uuid {}: all ranks have to "
            "pass the same handles, and if they pass a list, in the same order",
            bootstrap::describe(introductions_[me_]), bootstrap::describe(introductions_[rank]),
            uuid_);
    }
    if (!note.text.empty()) {
      othersKnow_ = true;
      throw Error(calls::errorKindOf(note.errorKind), note.text);
    }
    // The entry came in round 1.
    if (note.round > 1) note.entry = std::move(notes_[rank].entry);
    notes_[rank] = std::move(note);
  }

  std::vector<size_t> missing() const {
    std::vector<size_t> ranks;
    for (size_t rank = 0; rank < peers_.size(); ++rank) {
      const auto note = notes_.find(rank);
      if (rank != me_ && (note == notes_.end() || note->second.round < round_)) {
        ranks.push_back(rank);
      }
    }
    return ranks;
  }

  void checkPeers(const process::Peers& known) const {
    for (const size_t rank : missing()) {
      if (!peers_[rank]->lost) continue;
      raise(ErrorKind::PeerLost, "{} is lost: {}; leave its handle out",
            bootstrap::describe(introductions_[rank]), *peers_[rank]->lost);
    }
    if (const auto unreached = known.unreachedAmong(introductions_)) {
      raise(ErrorKind::PeerLost, "{} has no connection to {}: {}",
            bootstrap::describe(introductions_[me_]),
            bootstrap::describe(introductions_[unreached->rank]), unreached->cause);
    }
  }

  [[noreturn]] void raiseMissing(const process::Peers& known) const {
    std::vector<Rank> without, withOther;
    for (const size_t rank : missing()) {
      (otherUuids_[rank] ? withOther : without).push_back(static_cast<Rank>(rank));
    }
    std::string text;
    if (!without.empty()) text = bootstrap::listRanks(without) + " did not come";
    if (!withOther.empty()) {
      const auto rank = static_cast<size_t>(withOther.front());
      text += fmt::format("{}{} came with another uuid ({})", text.empty() ? "" : ", ",
                          bootstrap::listRanks(withOther), *otherUuids_[rank]);
    }
    if (text.empty()) {
      text = "no connection to " + bootstrap::listRanks(known.unconnectedAmong(introductions_));
    }
    raise(ErrorKind::Timeout,
          "{} waited {:.1f} s for the ranks of the change {}: {}; the ranks are those of the "
          "handles",
          bootstrap::describe(introductions_[me_]), static_cast<double>(timeout_) * 1e-9, uuid_,
          text);
  }

  MeetingPoint& point_;
  Engine& engine_;
  const std::vector<bootstrap::Handle>& members_;
  const int64_t uuid_;
  const size_t me_;
  const Nanoseconds timeout_;
  const uint64_t digest_;
  std::vector<bootstrap::Introduction> introductions_;  // without entries
  std::vector<process::Peer*> peers_;  // by rank; null for this one, and before it is met
  std::vector<std::optional<int64_t>>
      otherUuids_;                       // by rank: another change, for which it has sent a note
  std::map<size_t, MeetingNote> notes_;  // by rank: the last one
  uint32_t round_ = 0;
  bool othersKnow_ = false;  // that this rank has failed
};

std::shared_ptr<groups::Group> MeetingPoint::meet(groups::GroupSpec spec,
                                                  const std::vector<bootstrap::Handle>& members,
                                                  int64_t uuid, Nanoseconds timeout) {
  if (!usedUuids_.insert(uuid).second) {
    raise(ErrorKind::Usage, "uuid {} was already used for a change of the members; pass a new one",
          uuid);
  }
  const auto isMine = [&](const auto& member) { return member.mailbox == mailbox_; };
  spec.me = static_cast<Rank>(std::ranges::find_if(members, isMine) - members.begin());
  spec.size = static_cast<int>(members.size());
  spec.jobRanks.clear();
  PeerMeeting meeting(*this, spec, members, uuid, timeout);
  return engine_.createGroup(spec, meeting);
}

}  // namespace smddp::engine
