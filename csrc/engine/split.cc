#include "engine/split.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
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
std::vector<T> gather(Engine& engine, const std::shared_ptr<groups::Group>& parent, const T& mine,
                      Nanoseconds timeout) {
  const auto all = std::make_shared<std::vector<T>>(static_cast<size_t>(parent->spec().size));
  const auto own = std::make_shared<T>(mine);
  calls::Request request;
  request.collective = collectives::Collective::AllGather;
  request.partOf = calls::PartOf::SplitGroup;
  request.bytes = sizeof(T);
  request.input = {std::as_writable_bytes(std::span(own.get(), 1))};
  request.output = {std::as_writable_bytes(std::span(*all))};
  request.timeout = timeout;
  request.keepAlive =
      std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(all, own);
  engine.run(*parent, std::move(request));
  return *all;
}

// Why a rank could not do its part; an empty text if it could.
struct Outcome {
  ErrorKind kind = ErrorKind::Internal;
  Text<400> text{};
};

template <typename Step>
Outcome outcomeOf(const Step& step) {
  try {
    step();
    return {};
  } catch (const Error& error) {
    return {error.kind(), padded<400>(error.what())};
  } catch (const std::exception& error) {
    return {ErrorKind::Resource, padded<400>(error.what())};
  }
}

// What the members of a new group tell one another in the group of which they are ranks.
class Exchange {
 public:
  Exchange(Engine& engine, const std::shared_ptr<groups::Group>& parent,
           const std::vector<Rank>& members, Rank me, Nanoseconds timeout)
      : engine_(engine),
        parent_(parent),
        members_(members),
        me_(static_cast<size_t>(me)),
        timeout_(timeout) {}

  // What all members give, by rank in the new group; all give as many bytes. Throws, on all of them, if one could not do
  // its part. It takes one message from each member to the first, and one back.
  std::vector<std::vector<std::byte>> run(const Outcome& outcome, std::span<const std::byte> mine) {
    std::vector<std::byte> block(sizeof outcome + mine.size());
    std::memcpy(block.data(), &outcome, sizeof outcome);
    std::ranges::copy(mine, block.begin() + sizeof outcome);
    std::vector<std::vector<std::byte>> result;
    for (const auto theirs : exchanged(block)) {
      Outcome of;
      std::memcpy(&of, theirs.data(), sizeof of);
      if (of.text.front() != 0)
        throw Error(calls::errorKindOf(static_cast<uint32_t>(of.kind)), unpadded(of.text));
      result.emplace_back(theirs.begin() + sizeof of, theirs.end());
    }
    return result;
  }

 private:
  // The blocks of all members.
  std::vector<std::span<const std::byte>> exchanged(std::span<const std::byte> mine) {
    all_ = std::make_shared<std::vector<std::byte>>(members_.size() * mine.size());
    const auto of = [&](size_t rank) {
      return std::span(*all_).subspan(rank * mine.size(), mine.size());
    };
    std::ranges::copy(mine, of(me_).begin());
    if (me_ == 0) {
      for (size_t rank = 1; rank < members_.size(); ++rank) begin(false, rank, kTagUp, of(rank));
      finish();
      for (size_t rank = 1; rank < members_.size(); ++rank) begin(true, rank, kTagDown, *all_);
    } else {
      begin(true, 0, kTagUp, of(me_));
      finish();
      begin(false, 0, kTagDown, *all_);
    }
    finish();
    std::vector<std::span<const std::byte>> blocks;
    for (size_t rank = 0; rank < members_.size(); ++rank) blocks.push_back(of(rank));
    return blocks;
  }

  void begin(bool send, size_t rank, int32_t tag, std::span<std::byte> bytes) {
    calls::Message message;
    message.send = send;
    message.peer = members_[rank];
    message.tag = tag;
    message.buffer = {bytes};
    message.timeout = timeout_;
    message.keepAlive = all_;
    open_.push_back(engine_.submit(*parent_, std::move(message)));
  }

  void finish() {
    for (const auto& completion : open_) {
      engine_.wait(*parent_, *completion);
      if (completion->error()) throw *completion->error();
    }
    open_.clear();
  }

  Engine& engine_;
  const std::shared_ptr<groups::Group>& parent_;
  const std::vector<Rank>& members_;
  const size_t me_;
  const Nanoseconds timeout_;
  std::shared_ptr<std::vector<std::byte>> all_;  // messages may outlive this
  std::vector<calls::CompletionPtr> open_;
};

}  // namespace

void agreeOnMembers(Engine& engine, const std::shared_ptr<groups::Group>& parent,
                    const std::vector<Rank>& members, Nanoseconds timeout) {
  const Rank me = parent->spec().me;
  // Objections have the numbers of the job, as all texts.
  std::vector<Rank> named;
  for (const Rank rank : members) named.push_back(parent->jobRank(rank));
  const MemberList mine = listOf(named);
  const auto lists = gather(engine, parent, mine, timeout);
  Text<400> objection{};
  const bool isMember = std::find(members.begin(), members.end(), me) != members.end();
  for (const Rank rank : isMember ? members : std::vector<Rank>{}) {
    const MemberList& theirs = lists[static_cast<size_t>(rank)];
    if (theirs.digest == mine.digest) continue;
    objection = padded<400>(fmt::format("{} on rank {}, {} on rank {}", unpadded(mine.shown),
                                        parent->jobRank(me), unpadded(theirs.shown),
                                        parent->jobRank(rank)));
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

std::shared_ptr<groups::Group> splitGroup(Engine& engine,
                                          const std::shared_ptr<groups::Group>& parent,
                                          groups::Group::Spec spec,
                                          const std::vector<Rank>& members, Nanoseconds timeout) {
  spec.jobRanks.clear();
  for (const Rank rank : members) spec.jobRanks.push_back(parent->jobRank(rank));
  Exchange exchange(engine, parent, members, spec.me, timeout);
  std::shared_ptr<groups::Group> group;
  std::vector<std::byte> mine = team::GroupEntry{}.encode();
  Outcome begun = outcomeOf([&] {
    const auto [made, introduction] = engine.beginGroup(spec);
    group = made;
    mine = introduction.group;
  });
  if (!group) {
    begun.text = padded<400>(fmt::format("rank {} cannot join group \"{}\": {}",
                                         bootstrap::jobRankOf(spec.jobRanks, spec.me), spec.name,
                                         unpadded(begun.text)));
  }
  const auto entries = exchange.run(begun, mine);
  std::vector<bootstrap::Introduction> introductions;
  std::vector<std::string> nodes;
  engine.call([&] {
    for (size_t rank = 0; rank < members.size(); ++rank) {
      introductions.push_back(parent->introductionOf(members[rank], entries[rank]));
      nodes.push_back(fmt::format("{}", parent->topology().nodeOf(members[rank])));
    }
  });
  const Outcome joined = outcomeOf([&] { engine.finishGroup(group, introductions, nodes); });
  try {
    exchange.run(joined, {});
  } catch (...) {
    engine.destroyGroup(group);
    throw;
  }
  return group;
}

}  // namespace smddp::engine
