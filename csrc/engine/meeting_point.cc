#include "engine/meeting_point.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "common/interrupt.h"
#include "engine/process/capabilities.h"

namespace smddp::engine {
namespace {

// Fits into a control message with its head.
constexpr size_t kPartBytes = 900;

}  // namespace

MeetingPoint::MeetingPoint(Engine& engine)
    : engine_(engine), mailbox_([&] {
        uint64_t number = 0;
        engine.progress().call([&] { number = engine.process().newGroupId(); });
        return number;
      }()) {}

std::string MeetingPoint::makeHandle(uint32_t changes, Rank rank) const {
  const std::string host = process::addressForPeers(engine_.settings);
  bootstrap::Handle handle{{}, mailbox_, changes, rank};
  engine_.progress().call([&] {
    engine_.process().openFabric(1, host);
    handle.introduction = engine_.process().introduce({});
  });
  return bootstrap::textOf(handle, Seal(engine_.settings.jobToken.text));
}

std::vector<bootstrap::Handle> MeetingPoint::parseHandles(const std::vector<std::string>& texts,
                                                          bool isSet) const {
  const Seal seal(engine_.settings.jobToken.text);
  std::vector<bootstrap::Handle> handles;
  std::set<uint64_t> mailboxes;
  for (const std::string& text : texts) {
    handles.push_back(bootstrap::parseHandle(text, seal));
    if (!mailboxes.insert(handles.back().mailbox).second) {
      raise(ErrorKind::Usage, "the handle of {} is there twice",
            bootstrap::describe(handles.back().introduction));
    }
  }
  if (!mailboxes.contains(mailbox_)) {
    raise(ErrorKind::Usage,
          "none of the {} handles is that of this rank; only members of the new group call "
          "reconfigure()",
          texts.size());
  }
  if (isSet) bootstrap::sortHandles(handles);
  return handles;
}

// To map memory takes a while, so this is not done on the owner.
void MeetingPoint::mapMates(const std::vector<bootstrap::Introduction>& others) {
  bootstrap::Introduction mine;
  engine_.progress().call([&] { mine = engine_.process().introduce({}); });
  for (const auto& other : others) {
    std::string why;
    if (other.nodeName != mine.nodeName || other.processId == mine.processId) continue;
    if (engine_.process().tryMap(other, &why)) continue;
    raise(ErrorKind::Transport,
          "{} is on this host, but its memory cannot be reached: {}; give each container a "
          "SMDDP_NODE_ID of its own",
          bootstrap::describe(other), why);
  }
}

void MeetingPoint::receive() {
  for (const auto& part : engine_.takeNotes(mailbox_)) {
    if (notes_.size() >= kMaxNotes) continue;
    auto note = parts_.add(part.from, part.bytes);
    if (!note) continue;
    notes_.emplace_back(static_cast<Topic>(note->topic), Note{part.from, std::move(note->bytes)});
  }
}

std::vector<MeetingPoint::Note> MeetingPoint::take(Topic topic) {
  receive();
  std::vector<Note> taken;
  std::erase_if(notes_, [&](auto& note) {
    if (note.first != topic) return false;
    taken.push_back(std::move(note.second));
    return true;
  });
  return taken;
}

void MeetingPoint::send(const process::Peer& to, uint64_t mailbox, Topic topic,
                        std::span<const std::byte> bytes) {
  if (to.lost) return;
  for (const auto& part :
       bootstrap::partsOf(static_cast<uint32_t>(topic), ++sent_, bytes, kPartBytes)) {
    groups::GroupRegistry::sendNote(to, mailbox, part);
  }
}

void MeetingPoint::waitUntil(const std::function<bool()>& isOver,
                             const std::function<void()>& between) {
  // Usually all come at the same time: from one look to the next little time is lost at first.
  std::chrono::microseconds pause(50);
  constexpr std::chrono::microseconds kLongestPause(5000);
  for (;;) {
    bool over = false;
    engine_.progress().callAndRunContinuations([&] {
      process::Process& process = engine_.process();
      process.poll();
      process.peers().check();
      over = isOver();
    });
    if (over) return;
    if (between) between();
    checkInterrupt();
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, kLongestPause);
  }
}

}  // namespace smddp::engine
