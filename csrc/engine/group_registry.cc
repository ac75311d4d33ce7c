#include "engine/group_registry.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace smddp::engine {
namespace {

// Control messages kept for groups that this rank has not made yet: groups, and messages of each.
constexpr size_t kMaxEarly = 1024;
// Groups that have ended and are remembered. No message is under way for longer than it takes to end so many.
constexpr size_t kMaxEnded = 4096;

}  // namespace

GroupRegistry::GroupRegistry(const Ownership& ownership, Process& process)
    : ownership_(ownership), process_(process), ended_(kMaxEnded) {
  process_.setControlHandler(
      [this](Peer& from, transport::Bytes message) { dispatch(from, message); });
}

void GroupRegistry::add(const std::shared_ptr<Group>& group) {
  ownership_.assertOwned();
  joined_[group->id()] = group;
  const auto early = early_.extract(group->id());
  if (early.empty()) return;
  std::erase(earlyOrder_, group->id());
  for (const EarlyMessage& message : early.mapped()) group->onControl(*message.from, message.bytes);
}

void GroupRegistry::leave(const std::shared_ptr<Group>& group) {
  ownership_.assertOwned();
  const auto found = joined_.find(group->id());
  if (found == joined_.end() || found->second != group) return;
  group->leave();
  left_.push_back(group);
  joined_.erase(found);
}

void GroupRegistry::leaveAll() {
  ownership_.assertOwned();
  hasLeftAll_ = true;
  for (auto& [id, group] : joined_) {
    group->leave();
    left_.push_back(group);
  }
  joined_.clear();
  active_.clear();
}

std::string GroupRegistry::namesInChild() const {
  std::string names;
  for (const auto& [id, group] : joined_) {
    names += fmt::format("{}group \"{}\"", names.empty() ? "" : ", ", group->spec().name);
  }
  return names;
}

void GroupRegistry::reap() {
  ownership_.assertOwned();
  if (left_.empty()) return;
  process_.poll();
  process_.checkPeers();
  std::erase_if(left_, [this](const auto& group) {
    ownership_.assertOwned();
    if (!group->idle() || !group->tryGiveBack()) return false;
    std::erase(active_, group.get());
    ended_.insert(group->id());
    group->moveLeftoversTo(ofEndedGroups_);
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
  process_.checkPeers();
  return std::all_of(left_.begin(), left_.end(), [](const auto& group) {
    return !group->spansNodes() || group->tryGiveBack();
  });
}

void GroupRegistry::clear() {
  ownership_.assertOwned();
  left_.clear();
  early_.clear();
  earlyOrder_.clear();
}

void GroupRegistry::activate(Group& group) {
  ownership_.assertOwned();
  if (hasLeftAll_) return;
  if (std::find(active_.begin(), active_.end(), &group) == active_.end()) active_.push_back(&group);
}

bool GroupRegistry::isActiveAcrossNodes() const {
  ownership_.assertOwned();
  return std::any_of(active_.begin(), active_.end(),
                     [](Group* group) { return group->spansNodes(); });
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
  process_.checkPeers();
  for (size_t i = 0; i < active_.size(); ++i) active_[i]->checkHealth();
  for (auto& [id, group] : joined_) {
    if (group->checkMembers()) activate(*group);
  }
}

void GroupRegistry::failActive(const Error& error) {
  ownership_.assertOwned();
  for (Group* group : active_) group->fail(error);
}

void GroupRegistry::moveLeftoversTo(Leftovers& leftovers) {
  ownership_.assertOwned();
  leftovers.take(ofEndedGroups_);
  for (Group* group : active_) group->moveLeftoversTo(leftovers);
  for (auto& group : left_) group->moveLeftoversTo(leftovers);
  std::erase_if(active_, [](Group* group) { return group->idle(); });
}

void GroupRegistry::dispatch(Peer& from, transport::Bytes message) {
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
    if (group->id() == id) return group->onControl(from, message);
  }
  keepEarly(id, from, message);
}

// Messages to a group that this rank never makes would stay for ever: the oldest make room.
void GroupRegistry::keepEarly(uint64_t id, Peer& from, transport::Bytes message) {
  // A rank that waited may ask, or answer, while the others already end the group.
  if (ended_.contains(id)) return;
  if (!early_.contains(id)) {
    if (early_.size() == kMaxEarly) {
      early_.erase(earlyOrder_.front());
      earlyOrder_.pop_front();
    }
    earlyOrder_.push_back(id);
  }
  auto& waiting = early_[id];
  if (waiting.size() < kMaxEarly) waiting.push_back({&from, {message.begin(), message.end()}});
}

}  // namespace smddp::engine
