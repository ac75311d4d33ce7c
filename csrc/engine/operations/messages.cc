#include "engine/operations/messages.h"

#include <map>
#include <tuple>

#include "engine/calls/call.h"

namespace smddp::engine::operations {
namespace {

constexpr const char* nameOf(const calls::Message& message) {
  return message.send ? "send" : "recv";
}

// A receive from anyone may know its sender by now. Until then it depends on no particular rank: kAnySource.
Rank partnerOf(const Transfer& transfer) {
  const Rank source = transfer.completion->source();
  return !transfer.message.send && source >= 0 ? source : transfer.message.peer;
}

observe::Metrics::Algorithm* counted(observe::Metrics::Group* metrics, const char* name) {
  return metrics == nullptr ? nullptr : &metrics->algorithm(name, "message");
}

}  // namespace

Messages::Messages(process::Process& process, const team::Membership& membership,
                   plans::Channels& channels, calls::EndedOperations& ended,
                   observe::Metrics::Group* metrics)
    : process_(process),
      membership_(membership),
      channels_(channels),
      ended_(ended),
      metrics_(metrics),
      countedSends_(counted(metrics, "send")),
      countedReceives_(counted(metrics, "recv")),
      matcher_(process.ownership(), *this, membership.group, membership.me()) {}

void Messages::submit(calls::Message message, calls::CompletionPtr completion) {
  process_.ownership().assertOwned();
  Transfer transfer;
  transfer.deadline = Deadline::after(process_.clock(), message.timeout);
  if (metrics_ != nullptr) transfer.submittedAt = process_.clock().now();
  transfer.message = std::move(message);
  transfer.completion = std::move(completion);
  matcher_.submit(std::move(transfer));
}

void Messages::count(const Transfer& transfer) {
  const calls::Message& message = transfer.message;
  auto& calls = (message.send ? countedSends_ : countedReceives_)->of(transfer.bytes);
  calls.count(process_.clock().now() - transfer.submittedAt, transfer.bytes);
  const bool leavesNode =
      message.send && message.peer != membership_.me() && !membership_.isMate(message.peer);
  calls.countExecution(leavesNode ? transfer.bytes : 0, {});
}

void Messages::onControl(Rank from, transport::Bytes message) {
  process_.ownership().assertOwned();
  if (matcher_.onControl(from, message)) return;
  raise(ErrorKind::Transport, "rank {} sent a message that is not understood",
        membership_.jobRank(from));
}

bool Messages::withdraw(const calls::Completion& receive) {
  std::optional<Transfer> withdrawn = matcher_.withdraw(receive);
  if (!withdrawn) return false;
  ended_.release(std::move(withdrawn->message.keepAlive));
  return true;
}

void Messages::appendOpenSends(std::vector<calls::CompletionPtr>& open) {
  matcher_.forEach([&](Transfer& transfer) {
    if (transfer.message.send) open.push_back(transfer.completion);
  });
}

// There may be very many, and the health of a group is checked often. All that go the same way depend on one rank, and
// the one whose deadline comes first stands for them.
std::vector<calls::InFlight> Messages::inFlight() {
  struct SameWay {
    const Transfer* first = nullptr;
    size_t count = 0;
  };
  // By Message::send, partnerOf() and Transfer::isMatched.
  std::map<std::tuple<bool, Rank, bool>, SameWay> ways;
  matcher_.forEach([&](Transfer& transfer) {
    SameWay& way = ways[{transfer.message.send, partnerOf(transfer), transfer.isMatched}];
    if (way.count++ == 0 || transfer.deadline.at < way.first->deadline.at) way.first = &transfer;
  });
  std::vector<calls::InFlight> all;
  for (const auto& [key, way] : ways) {
    all.push_back(inFlightOf(*way.first));
    if (way.count > 1) all.back().wait += fmt::format(" (and {} more)", way.count - 1);
  }
  return all;
}

std::optional<calls::InFlight> Messages::inFlightOf(const calls::Completion& completion) {
  std::optional<calls::InFlight> found;
  matcher_.forEach([&](Transfer& transfer) {
    if (transfer.completion.get() == &completion) found = inFlightOf(transfer);
  });
  return found;
}

calls::InFlight Messages::inFlightOf(const Transfer& transfer) const {
  const calls::Message& message = transfer.message;
  calls::InFlight at;
  at.wait = fmt::format("to {} {} {}", message.send ? "send to" : "receive from",
                        message.peer == calls::kAnySource
                            ? "any rank"
                            : fmt::format("rank {}", membership_.jobRank(message.peer)),
                        calls::describeTag(message.tag));
  const Rank awaited = partnerOf(transfer);
  if (awaited == calls::kAnySource) {
    at.awaitsAnyone = true;
  } else if (awaited != membership_.me()) {
    at.awaited.insert(awaited);
  }
  at.isUnmatched = !transfer.isMatched;
  if (transfer.deadline.passed(process_.clock())) at.expired = message.timeout;
  return at;
}

void Messages::endBroken(const calls::Break& broken) {
  process_.ownership().assertOwned();
  matcher_.abandon();
  matcher_.forEach([&](Transfer& transfer) {
    ended_.keep(std::move(transfer.message.keepAlive));
    refuse(transfer.message, *transfer.completion, broken);
  });
  matcher_.clear();
}

void Messages::refuse(const calls::Message& message, calls::Completion& completion,
                      const calls::Break& broken) {
  const std::string what = fmt::format("{} (group \"{}\")", nameOf(message), membership_.name);
  if (metrics_ != nullptr) metrics_->countError(nameOf(message), toString(broken.cause.kind()));
  ended_.complete(completion, membership_.failed(what, broken.cause));
}

}  // namespace smddp::engine::operations
