#include "engine/split.h"

#include <fmt/format.h>

namespace smddp::engine {
namespace {

// Tags of the messages below. The process group has its own, see process_group/tags.h.
constexpr int32_t kTagUp = -3;
constexpr int32_t kTagDown = -4;

}  // namespace

std::shared_ptr<Group> splitGroup(Engine& engine, const std::shared_ptr<Group>& parent,
                                  const Group::Spec& spec, const std::vector<Rank>& members,
                                  Nanoseconds timeout) {
  const auto begun = engine.beginGroup(spec);
  const std::shared_ptr<Group>& group = begun.first;
  const bootstrap::Introduction& mine = begun.second;
  const size_t one = mine.group.size();
  // What everybody publishes has one size: rank r's part is at r * one. Shared with messages that may outlive us.
  const auto blobs = std::make_shared<std::vector<std::byte>>(members.size() * one);
  const auto me = static_cast<size_t>(spec.me);
  std::copy(mine.group.begin(), mine.group.end(), blobs->begin() + static_cast<long>(me * one));
  const auto part = [&](size_t rank) { return std::span(*blobs).subspan(rank * one, one); };
  std::vector<CompletionPtr> open;
  const auto message = [&](bool send, Rank peer, int32_t tag, std::span<std::byte> bytes) {
    Message message;
    message.send = send;
    message.peer = peer;
    message.tag = tag;
    message.buffer = {bytes};
    message.timeout = timeout;
    message.keepAlive = blobs;
    open.push_back(engine.submit(*parent, std::move(message)));
  };
  const auto settle = [&] {
    for (const auto& completion : open) {
      engine.wait(*parent, *completion);
      if (completion->error()) throw *completion->error();
    }
    open.clear();
  };
  if (me == 0) {
    for (size_t rank = 1; rank < members.size(); ++rank) {
      message(false, members[rank], kTagUp, part(rank));
    }
    settle();
    for (size_t rank = 1; rank < members.size(); ++rank) {
      message(true, members[rank], kTagDown, std::span(*blobs));
    }
  } else {
    message(true, members.front(), kTagUp, part(me));
    settle();
    message(false, members.front(), kTagDown, std::span(*blobs));
  }
  settle();

  std::vector<bootstrap::Introduction> introductions;
  std::vector<std::string> nodes;
  engine.call([&] {
    for (size_t rank = 0; rank < members.size(); ++rank) {
      const auto bytes = part(rank);
      introductions.push_back(parent->introductionOf(members[rank], {bytes.begin(), bytes.end()}));
      nodes.push_back(fmt::format("{}", parent->topology().nodeOf(members[rank])));
    }
  });
  engine.finishGroup(group, introductions, nodes);
  return group;
}

}  // namespace smddp::engine
