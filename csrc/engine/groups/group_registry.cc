#include "engine/groups/group_registry.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "common/log.h"
#include "engine/calls/control_kind.h"

namespace smddp::engine::groups {
namespace {

// The memory for messages to groups that this rank has not made yet: some 500 000 announcements of sends.
constexpr size_t kMaxEarlyBytes = size_t{64} << 20;
// Groups that are remembered after their end. No message is under way for longer than it takes to end so many.
constexpr size_t kMaxClosed = 4096;

// In front of a note.
//
//   byte  0               8               16
//         | header        | mailbox       | bytes …
struct NoteHead {
  transport::ControlHeader header{.kind = calls::kNote};
  uint64_t mailbox = 0;
};
static_assert(sizeof(NoteHead) == 16);

}  // namespace

GroupRegistry::GroupRegistry(const Ownership& ownership, process::Process& process)
    : ownership_(ownership), process_(process), closed_(kMaxClosed) {
  process_.setControlHandler(
      [this](process::Peer& from, transport::Bytes message) { dispatch(from, message); });
}

void GroupRegistry::add(const std::shared_ptr<Group>& group) {
  ownership_.assertOwned();
  joined_[group->membership.group] = group;
  if (closed_.find(group->membership.group)) {
    group->sentinel.fail(
        Error(ErrorKind::Resource,
              fmt::format("other ranks sent more than {} MiB of messages before this rank "
                          "had made the group; call a barrier before them",
                          kMaxEarlyBytes >> 20)));
    activate(*group);
    return;
  }
  for (const EarlyMessage& message : takeEarly(group->membership.group))
    dispatch(*message.from, message.bytes);
}

std::vector<GroupRegistry::Note> GroupRegistry::takeNotes(uint64_t mailbox) {
  ownership_.assertOwned();
  std::vector<Note> notes;
  for (const EarlyMessage& message : takeEarly(mailbox)) {
    if (message.bytes.size() < sizeof(NoteHead)) continue;
    notes.push_back(
        {message.from, {message.bytes.begin() + sizeof(NoteHead), message.bytes.end()}});
  }
  return notes;
}

void GroupRegistry::sendNote(const process::Peer& to, uint64_t mailbox,
                             std::span<const std::byte> bytes) {
  NoteHead head;
  head.mailbox = mailbox;
  head.header.tailBytes = static_cast<uint32_t>(bytes.size());
  std::vector<std::byte> message(sizeof head + bytes.size());
  std::memcpy(message.data(), &head, sizeof head);
  std::ranges::copy(bytes, message.begin() + sizeof head);
  tell(to, message);
}

void GroupRegistry::refuse(uint64_t id, const calls::Break& broken) {
  ownership_.assertOwned();
  takeEarly(id);
  closed_.insert(id, health::makeAbort(id, broken));
}

void GroupRegistry::leave(const std::shared_ptr<Group>& group, const char* how) {
  ownership_.assertOwned();
  const auto found = joined_.find(group->membership.group);
  if (found == joined_.end() || found->second != group) return;
  tellOfTrouble();
  group->sentinel.leave(group->idle(), how);
  left_.push_back(group);
  joined_.erase(found);
}

void GroupRegistry::leaveAll() {
  ownership_.assertOwned();
  hasLeftAll_ = true;
  tellOfTrouble();
  for (auto& [id, group] : joined_) {
    group->sentinel.leave(group->idle(), "left the group");
    left_.push_back(group);
  }
  joined_.clear();
  active_.clear();
}

std::string GroupRegistry::namesInChild() const {
  std::string names;
  for (const auto& [id, group] : joined_) {
    names += fmt::format("{}group \"{}\"", names.empty() ? "" : ", ", group->spec.name);
  }
  return names;
}

void GroupRegistry::reap() {
  ownership_.assertOwned();
  if (left_.empty()) return;
  process_.poll();
  process_.peers().check();
  std::erase_if(left_, [this](const auto& group) {
    ownership_.assertOwned();
    if (!group->idle() || !group->tryGiveBack()) return false;
    std::erase(active_, group.get());
    closed_.insert(group->membership.group, group->sentinel.farewell());
    group->ended.moveTo(ofEndedGroups_);
    return true;
  });
}

bool GroupRegistry::hasOpenExceptReceives() const {
  ownership_.assertOwned();
  return std::any_of(joined_.begin(), joined_.end(),
                     [](const auto& entry) { return !entry.second->openExceptReceives().empty(); });
}

bool GroupRegistry::areRemoteRanksDone() {
  ownership_.assertOwned();
  process_.poll();
  process_.peers().check();
  return process_.peers().isAllDelivered() &&
         std::all_of(left_.begin(), left_.end(), [](const auto& group) {
           return !group->membership.spansNodes() || group->tryGiveBack();
         });
}

void GroupRegistry::clear() {
  ownership_.assertOwned();
  left_.clear();
  early_.clear();
  earlyBytes_ = 0;
}

void GroupRegistry::activate(Group& group) {
  ownership_.assertOwned();
  if (hasLeftAll_) return;
  if (std::find(active_.begin(), active_.end(), &group) == active_.end()) active_.push_back(&group);
}

bool GroupRegistry::isActiveAcrossNodes() const {
  ownership_.assertOwned();
  return std::any_of(active_.begin(), active_.end(),
                     [](Group* group) { return group->membership.spansNodes(); });
}

bool GroupRegistry::advance() {
  ownership_.assertOwned();
  bool advanced = false;
  bool needsPolling = false;
  // By index: what advances may make another group active.
  for (size_t i = 0; i < active_.size(); ++i) {
    advanced |= active_[i]->advance();
    needsPolling |= active_[i]->needsPolling();
  }
  if (needsPolling && process_.poll() > 0) advanced = true;
  return advanced;
}

void GroupRegistry::checkHealth() {
  ownership_.assertOwned();
  process_.poll();
  process_.peers().check();
  for (size_t i = 0; i < active_.size(); ++i) active_[i]->sentinel.checkHealth();
  for (auto& [id, group] : joined_) {
    if (group->sentinel.checkMembers()) activate(*group);
  }
}

void GroupRegistry::tellOfTrouble() {
  ownership_.assertOwned();
  const std::string text = process_.takeFailure();
  if (text.empty()) return;
  for (auto& [id, group] : joined_) group->sentinel.tellOfTrouble(text);
}

void GroupRegistry::failActive(const Error& error) {
  ownership_.assertOwned();
  for (Group* group : active_) group->sentinel.fail(error);
}

void GroupRegistry::moveLeftoversTo(calls::Leftovers& leftovers) {
  ownership_.assertOwned();
  tellOfTrouble();
  leftovers.take(ofEndedGroups_);
  for (Group* group : active_) group->ended.moveTo(leftovers);
  for (auto& group : left_) group->ended.moveTo(leftovers);
  std::erase_if(active_, [](Group* group) {
    if (!group->idle()) return false;
    // This rank waits for nobody.
    group->team.clearBlame();
    return true;
  });
}

void GroupRegistry::dispatch(process::Peer& from, transport::Bytes message) {
  ownership_.assertOwned();
  // Every control message of the engine has its group behind the header.
  uint64_t id = 0;
  if (message.size() < sizeof(transport::ControlHeader) + sizeof id) return;
  std::memcpy(&id, message.data() + sizeof(transport::ControlHeader), sizeof id);
  if (const auto found = joined_.find(id); found != joined_.end()) {
    found->second->onControl(from, message);
    activate(*found->second);
    return;
  }
  for (const auto& group : left_) {
    if (group->membership.group == id) return group->onControl(from, message);
  }
  keepEarly(id, from, message);
}

// Messages to a group that this rank never makes would stay for ever: those of the group with the oldest make room. If
// this rank does make it, add() fails it.
void GroupRegistry::keepEarly(uint64_t id, process::Peer& from, transport::Bytes message) {
  const bool asks = transport::parseControlHeader(message)->kind == calls::kInquiry;
  if (const auto* farewell = closed_.find(id)) {
    if (asks && !farewell->empty()) tell(from, *farewell);
    return;
  }
  // A rank that asks will ask again.
  if (asks) return;
  early_.push_back({id, &from, {message.begin(), message.end()}});
  earlyBytes_ += early_.back().memory();
  while (earlyBytes_ > kMaxEarlyBytes) {
    const uint64_t oldest = early_.front().group;
    closed_.insert(oldest, {});
    takeEarly(oldest);
  }
}

void GroupRegistry::tell(const process::Peer& to, transport::Bytes message) {
  try {
    to.table->control(to.id, message);
  } catch (const Error& error) {
    SMDDP_LOG(Debug, "engine", "{} is not told: {}", to.describe(), error.what());
  }
}

std::deque<GroupRegistry::EarlyMessage> GroupRegistry::takeEarly(uint64_t id) {
  const auto first =
      std::stable_partition(early_.begin(), early_.end(),
                            [&](const EarlyMessage& message) { return message.group != id; });
  std::deque<EarlyMessage> taken(std::make_move_iterator(first),
                                 std::make_move_iterator(early_.end()));
  early_.erase(first, early_.end());
  for (const EarlyMessage& message : taken) earlyBytes_ -= message.memory();
  return taken;
}

}  // namespace smddp::engine::groups
