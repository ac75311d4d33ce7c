#include "engine/split.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>

#include "common/fnv.h"

namespace smddp::engine {
namespace {

// Tags of the messages below. The process group has its own, see process_group/tags.h.
constexpr int32_t kTagUp = -3;
constexpr int32_t kTagDown = -4;

// A text of one size, with zeros behind it.
template <size_t size>
using Text = std::array<char, size>;

template <size_t size>
Text<size> fixed(const std::string& text) {
  Text<size> result{};
  std::copy_n(text.begin(), std::min(text.size(), size - 1), result.begin());
  return result;
}

// The bytes may come from another process.
template <size_t size>
std::string loose(const Text<size>& text) {
  return {text.begin(), std::find(text.begin(), text.end(), '\0')};
}

// A list of members may be long: what is compared is a digest, what is shown is the beginning.
struct Choice {
  uint64_t digest = 0;
  Text<120> list{};
};

Choice choiceOf(const std::vector<Rank>& members) {
  Choice choice;
  std::string list;
  choice.digest = Fnv1a().add(std::as_bytes(std::span(members))).digest();
  for (const Rank rank : members) {
    if (list.size() < choice.list.size())
      list += fmt::format("{}{}", list.empty() ? "[" : ", ", rank);
  }
  list += "]";
  if (list.size() >= choice.list.size()) list.replace(choice.list.size() - 4, list.npos, "...");
  choice.list = fixed<120>(list);
  return choice;
}

// What each rank says, by rank.
template <typename T>
std::vector<T> gather(Engine& engine, const std::shared_ptr<Group>& parent, const T& mine,
                      Nanoseconds timeout) {
  const auto all = std::make_shared<std::vector<T>>(static_cast<size_t>(parent->spec().size));
  const auto own = std::make_shared<T>(mine);
  Request request;
  request.collective = collectives::Collective::AllGather;
  request.partOf = PartOf::SplitGroup;
  request.bytes = sizeof(T);
  request.input = {std::as_writable_bytes(std::span(own.get(), 1))};
  request.output = {std::as_writable_bytes(std::span(*all))};
  request.timeout = timeout;
  request.willWait = true;
  request.keepAlive =
      std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(all, own);
  const auto completion = engine.submit(*parent, std::move(request));
  engine.wait(*parent, *completion);
  if (completion->error()) throw *completion->error();
  return *all;
}

}  // namespace

void agreeOnMembers(Engine& engine, const std::shared_ptr<Group>& parent,
                    const std::vector<Rank>& members, Nanoseconds timeout) {
  const Rank me = parent->spec().me;
  const Choice mine = choiceOf(members);
  const auto choices = gather(engine, parent, mine, timeout);
  Text<400> objection{};
  const bool isMember = std::find(members.begin(), members.end(), me) != members.end();
  for (const Rank rank : isMember ? members : std::vector<Rank>{}) {
    const Choice& theirs = choices[static_cast<size_t>(rank)];
    if (theirs.digest == mine.digest) continue;
    objection = fixed<400>(fmt::format("{} on rank {}, {} on rank {}", loose(mine.list), me,
                                       loose(theirs.list), rank));
    break;
  }
  // A rank that finds nothing wrong may be needed by one that does.
  for (const auto& one : gather(engine, parent, objection, timeout)) {
    if (one.front() == 0) continue;
    raise(
        ErrorKind::Mismatch,
        "split_group of group \"{}\" with other members on two ranks: {}. All ranks of a new group "
        "have to name the same ranks in the same order",
        parent->spec().name, loose(one));
  }
}

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
