#include "engine/messages.h"

#include "engine/call.h"

namespace smddp::engine {

Messages::Messages(Process& process, const Membership& membership, Channels& channels,
                   ContinuationQueue& continuations)
    : process_(process),
      membership_(membership),
      channels_(channels),
      continuations_(continuations),
      matcher_(process.ownership(), *this, membership.group, membership.me(),
               Channels::kMessageBytes) {}

void Messages::submit(Message message, CompletionPtr completion) {
  process_.ownership().assertOwned();
  Exchange exchange;
  exchange.deadline = Deadline::after(process_.clock(), message.timeout);
  exchange.message = std::move(message);
  exchange.completion = std::move(completion);
  matcher_.submit(std::move(exchange));
}

void Messages::onControl(Rank from, transport::Bytes message) {
  process_.ownership().assertOwned();
  if (matcher_.onControl(from, message)) return;
  raise(ErrorKind::Transport, "rank {} sent a message that is not understood", from);
}

void Messages::appendOpenSends(std::vector<CompletionPtr>& open) {
  matcher_.forEach([&](Exchange& exchange) {
    if (exchange.message.send) open.push_back(exchange.completion);
  });
}

std::vector<Standstill> Messages::standstills() {
  std::vector<Standstill> all;
  matcher_.forEach([&](Exchange& exchange) { all.push_back(standstillOf(exchange)); });
  return all;
}

std::optional<Standstill> Messages::standstillOf(const Completion& completion) {
  std::optional<Standstill> found;
  matcher_.forEach([&](Exchange& exchange) {
    if (exchange.completion.get() == &completion) found = standstillOf(exchange);
  });
  return found;
}

Standstill Messages::standstillOf(const Exchange& exchange) const {
  const Message& message = exchange.message;
  Standstill at;
  at.wait =
      fmt::format("to {} {} {}", message.send ? "send to" : "receive from",
                  message.peer == kAnySource ? "any rank" : fmt::format("rank {}", message.peer),
                  describeTag(message.tag));
  // A receive from anyone may know its sender by now. Until then it depends on no particular rank.
  const Rank source = exchange.completion->source();
  const Rank awaited = !message.send && source >= 0 ? source : message.peer;
  if (awaited == kAnySource) {
    at.awaitsAnyone = true;
  } else if (awaited != membership_.me()) {
    at.awaited.insert(awaited);
  }
  if (exchange.deadline.passed(process_.clock())) at.expired = message.timeout;
  return at;
}

void Messages::endFrom(const Break& broken) {
  process_.ownership().assertOwned();
  matcher_.forEach([&](Exchange& exchange) {
    continuations_.keep(std::move(exchange.message.keepAlive));
    const std::string what =
        fmt::format("{} (group \"{}\")", exchange.message.send ? "send" : "recv", membership_.name);
    continuations_.finish(*exchange.completion, membership_.failed(what, broken.cause));
  });
  matcher_.clear();
}

}  // namespace smddp::engine
