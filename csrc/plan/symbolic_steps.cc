// SymbolicRun: the steps that synchronise lanes and ranks.
#include <algorithm>

#include <fmt/format.h>

#include "plan/symbolic_run.h"

namespace smddp::plan {
namespace {

// Adds the moment `now` of a lane to the first `count` messages. It stops at the first message that already has a
// moment of this lane, because then all earlier ones have one, too.
void note(std::vector<Message>& messages, const std::vector<uint32_t>& order, int64_t count,
          std::vector<Epoch> Message::*moments, Epoch now) {
  for (int64_t m = count - 1; m >= 0; --m) {
    std::vector<Epoch>& known = messages[order[m]].*moments;
    const bool isKnown = std::any_of(known.begin(), known.end(),
                                     [&](const Epoch& e) { return e.thread == now.thread; });
    if (isKnown) return;
    known.push_back(now);
  }
}

}  // namespace

// As at run time, a counter has the number of the execution in its upper 32 bits. So a value of a later execution
// also satisfies the waits of earlier ones.
int64_t SymbolicRun::stampOf(const Thread& t, int64_t value) const {
  return (static_cast<int64_t>(ranks_[t.rank].execution) << 32) + value;
}

SymbolicRun::Channel& SymbolicRun::outgoing(const Thread& t, const Step& step) {
  return channels_.at({t.rank, step.who, step.stream});
}

SymbolicRun::Channel& SymbolicRun::incoming(const Thread& t, const Step& step) {
  return channels_.at({step.who, t.rank, step.stream});
}

std::vector<Rank> SymbolicRun::waitedFor(const Thread& t, const Step& step) const {
  const auto& team = topology_.node(topology_.nodeOf(t.rank));
  if (step.who != kMates) return {team[step.who]};
  std::vector<Rank> others;
  std::copy_if(team.begin(), team.end(), std::back_inserter(others),
               [&](Rank mate) { return mate != t.rank; });
  return others;
}

// True if the next step can be done now. If not, the thread is put on the waiting list of the counter or channel.
bool SymbolicRun::isReady(uint32_t thread, const Step& step) {
  const Thread& t = threads_[thread];
  const int64_t value = step.value.at(t.trip);
  const size_t e = ranks_[t.rank].execution;
  std::vector<uint32_t>* waiting = nullptr;
  if (step.op == Op::Wait && value > 0) {
    for (const Rank mate : waitedFor(t, step)) {
      Counter& counter = ranks_[mate].counters[step.counter];
      if (counter.history.empty() || counter.history.back().value < stampOf(t, value)) {
        waiting = &counter.waiting;
        break;
      }
    }
  } else if (step.op == Op::Put) {
    Channel& channel = outgoing(t, step);
    const int64_t number = channel.base[e] + value - 1;
    const int64_t released = channel.releases.empty() ? 0 : channel.releases.back().value;
    // Several lanes may put on one channel; messages are sent in the order of their numbers.
    const bool isTooEarly = number > static_cast<int64_t>(channel.messages.size());
    if (isTooEarly || released <= number - limits_.window) waiting = &channel.waiting;
  } else if (step.op == Op::Receive || step.op == Op::Flush) {
    Channel& channel = step.op == Op::Receive ? incoming(t, step) : outgoing(t, step);
    const auto put = static_cast<int64_t>(channel.messages.size());
    if (put < channel.base[e] + value) waiting = &channel.waiting;
  }
  if (waiting) waiting->push_back(thread);
  return waiting == nullptr;
}

void SymbolicRun::perform(Thread& t, const Step& step) {
  const int64_t value = step.value.at(t.trip);
  switch (step.op) {
    case Op::Copy: return copy(t, step);
    case Op::Reduce: return reduce(t, step);
    case Op::Signal: return signal(t, step, value);
    case Op::Wait: return wait(t, step, value);
    case Op::Put: return put(t, step, value);
    case Op::Post: return post(t, step, value);
    case Op::Receive: return receive(t, step, value);
    case Op::Release: return release(t, step, value);
    case Op::Flush: return flush(t, step, value);
  }
}

void SymbolicRun::signal(Thread& t, const Step& step, int64_t value) {
  Counter& counter = ranks_[t.rank].counters[step.counter];
  const int64_t stamp = stampOf(t, value);
  if (value <= 0 || value >> 32 != 0) {
    fail(Verdict::Kind::Malformed, nameOf(t) + ": a counter's values lie in 1 .. 2^32 - 1");
  }
  if (!counter.history.empty()) {
    const Signalled& last = counter.history.back();
    if (!t.clock.includes(last.clock.now())) {
      fail(Verdict::Kind::Race, fmt::format("{} and {} raise the same counter; nothing orders the "
                                            "two",
                                            nameOf(t), nameOf(last.clock.now())));
    }
    if (stamp <= last.value) {
      fail(Verdict::Kind::Malformed,
           fmt::format("{}: the counter is already at {}", nameOf(t), last.value & 0xffffffff));
    }
  }
  counter.history.push_back({stamp, t.clock});
  wake(counter.waiting);
}

void SymbolicRun::wait(Thread& t, const Step& step, int64_t value) {
  if (value <= 0) return;
  const int64_t stamp = stampOf(t, value);
  for (const Rank mate : waitedFor(t, step)) {
    const auto& history = ranks_[mate].counters[step.counter].history;
    // The wait is ordered after the first signal that satisfies it. Later signals may have happened in this run, but
    // need not have in others.
    const auto enough =
        std::lower_bound(history.begin(), history.end(), stamp,
                         [](const Signalled& s, int64_t wanted) { return s.value < wanted; });
    t.clock.join(enough->clock);
  }
}

void SymbolicRun::put(Thread& t, const Step& step, int64_t value) {
  Channel& channel = outgoing(t, step);
  const size_t e = ranks_[t.rank].execution;
  const int64_t number = channel.base[e] + value - 1;
  const bool isNext = number == static_cast<int64_t>(channel.messages.size());
  if (!isNext || number < channel.base[e] || number >= channel.base[e + 1]) {
    fail(Verdict::Kind::Malformed,
         fmt::format("{}: {} of {} messages have been put already", nameOf(t),
                     static_cast<int64_t>(channel.messages.size()) - channel.base[e],
                     channel.base[e + 1] - channel.base[e]));
  }
  if (number > channel.base[e]) t.clock.join(messages_[channel.messages.back()].sent);
  const int64_t consumed = number + 1 - limits_.window;
  if (consumed > 0) {
    const auto credit =
        std::lower_bound(channel.releases.begin(), channel.releases.end(), consumed,
                         [](const Signalled& s, int64_t wanted) { return s.value < wanted; });
    t.clock.join(credit->clock);
    // Later puts need later credit, so earlier releases can go. In a long run they would take most of the memory.
    channel.releases.erase(channel.releases.begin(), credit);
  }
  const auto message = static_cast<uint32_t>(messages_.size());
  messages_.push_back({t.clock, t.clock.now(), step.length, {}, {}, {}});
  channel.messages.push_back(message);
  transmit(t, step, channel, message);
  wake(channel.waiting);
}

void SymbolicRun::post(Thread& t, const Step& step, int64_t value) {
  Channel& channel = incoming(t, step);
  const size_t e = ranks_[t.rank].execution;
  const int64_t number = channel.base[e] + value - 1;
  if (value < 1 || number >= channel.base[e + 1]) {
    fail(Verdict::Kind::Malformed, nameOf(t) + ": the plan declares fewer receives");
  }
  const Place place = resolve(t, planOf(t).destination(step, 0), step.length);
  if (!usesPosts_) return;
  const bool isPut = number < static_cast<int64_t>(channel.messages.size());
  // Too late: it lies in its slot.
  if (isPut && !messages_[channel.messages[number]].received.empty()) return;
  const auto [entry, isNew] =
      channel.posted.try_emplace(number, Posted{place, step.length, t.clock});
  if (!isNew) fail(Verdict::Kind::Malformed, nameOf(t) + ": the message is posted already");
  if (!isPut) return;
  arrive(entry->second, channel.messages[number]);
}

void SymbolicRun::receive(Thread& t, const Step& step, int64_t value) {
  Channel& channel = incoming(t, step);
  const int64_t count = channel.base[ranks_[t.rank].execution] + value;
  if (value < 1 || count > channel.base[ranks_[t.rank].execution + 1]) {
    fail(Verdict::Kind::Malformed, nameOf(t) + ": the plan declares fewer receives");
  }
  const Message& message = messages_[channel.messages[count - 1]];
  if (message.length != step.length) {
    fail(Verdict::Kind::Malformed,
         fmt::format("{}: {} sent {} bytes", nameOf(t), nameOf(message.putAt), message.length));
  }
  // The puts of a channel are ordered, so the clock of the last one includes those before it.
  t.clock.join(message.sent);
  note(messages_, channel.messages, count, &Message::received, t.clock.now());
}

void SymbolicRun::release(Thread& t, const Step& step, int64_t value) {
  Channel& channel = incoming(t, step);
  const int64_t count = channel.base[ranks_[t.rank].execution] + value;
  const int64_t before = channel.releases.empty() ? 0 : channel.releases.back().value;
  if (count <= before || count > channel.base[ranks_[t.rank].execution + 1]) {
    fail(Verdict::Kind::Malformed,
         fmt::format(
             "{}: {} of the {} messages are released already", nameOf(t),
             before - channel.base[ranks_[t.rank].execution],
             channel.base[ranks_[t.rank].execution + 1] - channel.base[ranks_[t.rank].execution]));
  }
  if (before > 0 && !t.clock.includes(channel.releases.back().clock.now())) {
    fail(Verdict::Kind::Race,
         fmt::format("{} and {} release on the same channel; nothing orders the two", nameOf(t),
                     nameOf(channel.releases.back().clock.now())));
  }
  const bool isPut = count <= static_cast<int64_t>(channel.messages.size());
  const auto isReceived = [&] {
    const auto& received = messages_[channel.messages[count - 1]].received;
    return std::any_of(received.begin(), received.end(),
                       [&](const Epoch& e) { return t.clock.includes(e); });
  };
  if (!isPut || !isReceived()) {
    fail(Verdict::Kind::Race, nameOf(t) + ": the message is not known to have arrived");
  }
  channel.releases.push_back({count, t.clock});
  channel.posted.erase(channel.posted.begin(), channel.posted.lower_bound(count));
  wake(channel.waiting);
}

void SymbolicRun::flush(Thread& t, const Step& step, int64_t value) {
  if (value <= 0) return;
  Channel& channel = outgoing(t, step);
  const int64_t count = channel.base[ranks_[t.rank].execution] + value;
  t.clock.join(messages_[channel.messages[count - 1]].sent);
  note(messages_, channel.messages, count, &Message::flushed, t.clock.now());
}

}  // namespace smddp::plan
