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

// A text in a fixed number of bytes, with zeros behind it.
template <size_t size>
using Text = std::array<char, size>;

template <size_t size>
Text<size> padded(const std::string& text) {
  Text<size> result{};
  std::copy_n(text.begin(), std::min(text.size(), size - 1), result.begin());
  return result;
}

// The text without the zeros. The bytes may come from another process: there may be no zero.
template <size_t size>
std::string unpadded(const Text<size>& text) {
  return {text.begin(), std::find(text.begin(), text.end(), '\0')};
}

// A list of members may be long: a digest of it is compared, and its beginning is shown.
struct MemberList {
  uint64_t digest = 0;
  Text<120> shown{};
};

MemberList listOf(const std::vector<Rank>& members) {
  MemberList result;
  std::string list = "[";
  result.digest = Fnv1a().add(std::as_bytes(std::span(members))).digest();
  for (const Rank rank : members) {
    if (list.size() < result.shown.size())
      list += fmt::format("{}{}", list.size() == 1 ? "" : ", ", rank);
  }
  list += "]";
  if (list.size() >= result.shown.size()) list.replace(result.shown.size() - 4, list.npos, "...");
  result.shown = padded<120>(list);
  return result;
}

// An all-gather: the values of all ranks, by rank.
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
  const MemberList mine = listOf(members);
  const auto lists = gather(engine, parent, mine, timeout);
  Text<400> objection{};
  const bool isMember = std::find(members.begin(), members.end(), me) != members.end();
  for (const Rank rank : isMember ? members : std::vector<Rank>{}) {
    const MemberList& theirs = lists[static_cast<size_t>(rank)];
    if (theirs.digest == mine.digest) continue;
    objection = padded<400>(fmt::format("{} on rank {}, {} on rank {}", unpadded(mine.shown), me,
                                        unpadded(theirs.shown), rank));
    break;
  }
  // Only some ranks may have found the difference; all must throw.
  for (const auto& one : gather(engine, parent, objection, timeout)) {
    if (one.front() == 0) continue;
    raise(
        ErrorKind::Mismatch,
        "split_group of group \"{}\" with other members on two ranks: {}. All ranks of a new group "
        "have to name the same ranks in the same order",
        parent->spec().name, unpadded(one));
  }
}

std::shared_ptr<Group> splitGroup(Engine& engine, const std::shared_ptr<Group>& parent,
                                  const Group::Spec& spec, const std::vector<Rank>& members,
                                  Nanoseconds timeout) {
  const auto begun = engine.beginGroup(spec);
  const std::shared_ptr<Group>& group = begun.first;
  const bootstrap::Introduction& mine = begun.second;
  const size_t size = mine.group.size();
  // The entries of all members have the same size: that of rank r begins at r * size. Shared with messages, which may
  // outlive this function.
  const auto entries = std::make_shared<std::vector<std::byte>>(members.size() * size);
  const auto me = static_cast<size_t>(spec.me);
  std::copy(mine.group.begin(), mine.group.end(), entries->begin() + static_cast<long>(me * size));
  const auto entryOf = [&](size_t rank) { return std::span(*entries).subspan(rank * size, size); };
  std::vector<CompletionPtr> open;
  const auto submit = [&](bool send, Rank rank, int32_t tag, std::span<std::byte> bytes) {
    Message message;
    message.send = send;
    message.peer = rank;
    message.tag = tag;
    message.buffer = {bytes};
    message.timeout = timeout;
    message.keepAlive = entries;
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
      submit(false, members[rank], kTagUp, entryOf(rank));
    }
    settle();
    for (size_t rank = 1; rank < members.size(); ++rank) {
      submit(true, members[rank], kTagDown, std::span(*entries));
    }
  } else {
    submit(true, members.front(), kTagUp, entryOf(me));
    settle();
    submit(false, members.front(), kTagDown, std::span(*entries));
  }
  settle();

  std::vector<bootstrap::Introduction> introductions;
  std::vector<std::string> nodes;
  engine.call([&] {
    for (size_t rank = 0; rank < members.size(); ++rank) {
      const auto bytes = entryOf(rank);
      introductions.push_back(parent->introductionOf(members[rank], {bytes.begin(), bytes.end()}));
      nodes.push_back(fmt::format("{}", parent->topology().nodeOf(members[rank])));
    }
  });
  engine.finishGroup(group, introductions, nodes);
  return group;
}

}  // namespace smddp::engine
