#include "engine/split.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <span>

#include "common/fnv.h"
#include "common/log.h"
#include "engine/groups/meeting.h"

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
  const auto all = std::make_shared<std::vector<T>>(static_cast<size_t>(parent->spec.size));
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

// The members meet in messages of the parent. It takes two rounds, in which each member sends one message to the first,
// and gets one back: in exchange() and in complete(), or in tell().
class ParentMeeting final : public groups::Meeting {
 public:
  // The arguments outlive the meeting.
  ParentMeeting(Engine& engine, const std::shared_ptr<groups::Group>& parent,
                const groups::GroupSpec& spec, const std::vector<Rank>& members,
                Nanoseconds timeout)
      : engine_(engine),
        parent_(parent),
        spec_(spec),
        members_(members),
        me_(static_cast<size_t>(spec.me)),
        timeout_(timeout) {}

  groups::Members exchange(const bootstrap::Introduction& mine) override {
    const auto entries = round({}, mine.group);
    groups::Members all;
    engine_.progress().call([&] {
      for (size_t rank = 0; rank < members_.size(); ++rank) {
        all.introductions.push_back(parent_->introductionOf(members_[rank], entries[rank]));
        all.nodeOfRank.push_back(
            fmt::format("{}", parent_->membership.topology.nodeOf(members_[rank])));
      }
    });
    return all;
  }
  void complete() override { round({}, {}); }
  Error tell(const Error& error) noexcept override {
    if (othersKnow_) return error;
    try {
      std::vector<std::byte> entry;
      std::string text = error.what();
      if (rounds_ == 0) {
        entry = team::GroupEntry{}.encode();
        text = fmt::format("rank {} cannot join group \"{}\": {}",
                           bootstrap::jobRankOf(spec_.jobRanks, spec_.me), spec_.name, text);
      }
      round({error.kind(), padded<400>(text)}, entry);
    } catch (const Error& first) {
      return first;
    } catch (const std::exception& failure) {
      SMDDP_LOG(Debug, "engine", "no other rank hears of \"{}\": {}", error.what(), failure.what());
    }
    return error;
  }

 private:
  // Returns the bytes that all members give, by rank in the new group; all give as many bytes. Throws, on all of them,
  // if one could not do its part.
  std::vector<std::vector<std::byte>> round(const Outcome& outcome,
                                            std::span<const std::byte> mine) {
    ++rounds_;
    std::vector<std::byte> block(sizeof outcome + mine.size());
    std::memcpy(block.data(), &outcome, sizeof outcome);
    std::ranges::copy(mine, block.begin() + sizeof outcome);
    std::vector<std::vector<std::byte>> result;
    othersKnow_ = true;
    for (const auto theirs : exchanged(block)) {
      Outcome of;
      std::memcpy(&of, theirs.data(), sizeof of);
      if (of.text.front() != 0) {
        throw Error(calls::errorKindOf(static_cast<uint32_t>(of.kind)), unpadded(of.text));
      }
      result.emplace_back(theirs.begin() + sizeof of, theirs.end());
    }
    othersKnow_ = false;
    return result;
  }

  // The blocks of all members.
  std::vector<std::span<const std::byte>> exchanged(std::span<const std::byte> mine) {
    all_ = std::make_shared<std::vector<std::byte>>(members_.size() * mine.size());
    const auto of = [&](size_t rank) {
      return std::span(*all_).subspan(rank * mine.size(), mine.size());
    };
    std::ranges::copy(mine, of(me_).begin());
    if (me_ == 0) {
      for (size_t rank = 1; rank < members_.size(); ++rank) begin(false, rank, kTagUp, of(rank));
      waitForOpen();
      for (size_t rank = 1; rank < members_.size(); ++rank) begin(true, rank, kTagDown, *all_);
    } else {
      begin(true, 0, kTagUp, of(me_));
      waitForOpen();
      begin(false, 0, kTagDown, *all_);
    }
    waitForOpen();
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

  void waitForOpen() {
    for (const auto& completion : open_) {
      engine_.wait(*parent_, *completion);
      if (completion->error()) throw *completion->error();
    }
    open_.clear();
  }

  Engine& engine_;
  const std::shared_ptr<groups::Group>& parent_;
  const groups::GroupSpec& spec_;
  const std::vector<Rank>& members_;
  const size_t me_;
  const Nanoseconds timeout_;
  std::shared_ptr<std::vector<std::byte>> all_;  // messages may outlive this
  std::vector<calls::CompletionPtr> open_;
  int rounds_ = 0;
  bool othersKnow_ = false;  // that this rank has failed
};

}  // namespace

void agreeOnMembers(Engine& engine, const std::shared_ptr<groups::Group>& parent,
                    const std::vector<Rank>& members, Nanoseconds timeout) {
  const Rank me = parent->spec.me;
  // Objections have the numbers of the job, as all texts.
  std::vector<Rank> named;
  for (const Rank rank : members) named.push_back(parent->membership.jobRank(rank));
  const MemberList mine = listOf(named);
  const auto lists = gather(engine, parent, mine, timeout);
  Text<400> objection{};
  const bool isMember = std::find(members.begin(), members.end(), me) != members.end();
  for (const Rank rank : isMember ? members : std::vector<Rank>{}) {
    const MemberList& theirs = lists[static_cast<size_t>(rank)];
    if (theirs.digest == mine.digest) continue;
    objection = padded<400>(fmt::format("{} on rank {}, {} on rank {}", unpadded(mine.shown),
                                        parent->membership.jobRank(me), unpadded(theirs.shown),
                                        parent->membership.jobRank(rank)));
    break;
  }
  // Only some ranks may have found the difference; all must throw.
  for (const auto& one : gather(engine, parent, objection, timeout)) {
    if (one.front() == 0) continue;
    raise(
        ErrorKind::Mismatch,
        "split_group of group \"{}\" with other members on two ranks: {}. All ranks of a new group "
        "have to name the same ranks in the same order",
        parent->spec.name, unpadded(one));
  }
}

std::shared_ptr<groups::Group> splitGroup(Engine& engine,
                                          const std::shared_ptr<groups::Group>& parent,
                                          groups::GroupSpec spec, const std::vector<Rank>& members,
                                          Nanoseconds timeout) {
  spec.jobRanks.clear();
  for (const Rank rank : members) spec.jobRanks.push_back(parent->membership.jobRank(rank));
  ParentMeeting meeting(engine, parent, spec, members, timeout);
  return engine.createGroup(spec, meeting);
}

}  // namespace smddp::engine
