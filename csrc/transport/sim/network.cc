#include "transport/sim/network.h"

#include <algorithm>
#include <cstring>

#include "common/error.h"
#include "transport/sim/sim_transport.h"

namespace smddp::transport::sim {

// A put in flight. It does not keep the address of the target's memory, which may be gone when the put arrives.
struct SimNetwork::Flight {
  int from = 0, to = 0;
  RemoteSlot slot;
  uint32_t immediate = 0;
  uint64_t token = 0;
  std::vector<std::byte> bytes;  // the header, and the payload after readPayload()
  Bytes payload;                 // the sender's
  bool read = false;
};

SimNetwork::SimNetwork(uint64_t seed, const Faults& faults) : random_(seed), faults_(faults) {}
SimNetwork::~SimNetwork() = default;

std::unique_ptr<SimTransport> SimNetwork::create(const std::string& name) {
  const auto endpoint = static_cast<int>(endpoints_.size());
  std::unique_ptr<SimTransport> made(new SimTransport(*this, endpoint, name));
  endpoints_.push_back(made.get());
  return made;
}

bool SimNetwork::advance() {
  if (events_.empty()) return false;
  // top() is const. It is safe to move the action out, because the event is popped at once.
  Event event = std::move(const_cast<Event&>(events_.top()));
  events_.pop();
  clock_.now_ = event.time;
  event.action();
  return true;
}

void SimNetwork::advanceTo(Nanoseconds time) {
  while (!events_.empty() && events_.top().time <= time) advance();
  clock_.now_ = std::max(clock_.now_, time);
}

void SimNetwork::at(Nanoseconds time, std::function<void()> action) {
  events_.push({std::max(time, clock_.now_), ++lastNumber_, std::move(action)});
}

SimNetwork::Link& SimNetwork::link(int from, int to) {
  const auto [entry, fresh] = links_.try_emplace({from, to});
  if (fresh) entry->second.faults = faults_;
  return entry->second;
}

void SimNetwork::setFaults(int from, int to, const Faults& faults) {
  link(from, to).faults = faults;
}

void SimNetwork::partition(int a, int b, Nanoseconds from, Nanoseconds until, Outage outage) {
  link(a, b).downs.push_back({from, until, outage});
  link(b, a).downs.push_back({from, until, outage});
}

void SimNetwork::kill(int endpoint, std::optional<Nanoseconds> detection) {
  SimTransport* victim = alive(endpoint);
  if (victim == nullptr) return;
  victim->killed_ = true;
  remove(endpoint);
  note(4, endpoint, endpoint, 0);
  if (!detection) return;
  at(clock_.now() + *detection, [this, endpoint, cause = victim->name() + " was killed"] {
    for (SimTransport* other : endpoints_) {
      if (other != nullptr) other->onPeerFailed(endpoint, cause);
    }
  });
}

void SimNetwork::remove(int endpoint) { endpoints_[static_cast<size_t>(endpoint)] = nullptr; }

Nanoseconds SimNetwork::delay(const Link& link) {
  return random_.between(link.faults.minDelay, link.faults.maxDelay);
}

const SimNetwork::Down* SimNetwork::outageOf(const Link& link) const {
  const auto found = std::ranges::find_if(link.downs, [this](const Down& down) {
    return clock_.now() >= down.from && clock_.now() < down.until;
  });
  return found == link.downs.end() ? nullptr : &*found;
}

void SimNetwork::hold(const Link& link, const Down& down, std::function<void()> again) {
  if (down.outage == Outage::Hold && down.until != kForever) {
    at(down.until + delay(link), std::move(again));
  }
}

bool SimNetwork::control(int from, int to, Bytes message) {
  Link& l = link(from, to);
  if (l.controls.size() >= kLinkDepth || random_.chance(l.faults.refuse)) return false;
  if (random_.chance(l.faults.drop)) return true;
  l.controls.emplace_back(message.begin(), message.end());
  at(clock_.now() + delay(l), [this, from, to] { deliverControl(from, to); });
  return true;
}

// Every event delivers the oldest message of its link, whichever it was made for. So the order survives outages.
void SimNetwork::deliverControl(int from, int to) {
  Link& l = link(from, to);
  if (alive(from) == nullptr || alive(to) == nullptr) return;
  if (const Down* down = outageOf(l)) {
    if (down->outage == Outage::Drop) l.controls.pop_front();
    return hold(l, *down, [this, from, to] { deliverControl(from, to); });
  }
  std::vector<std::byte> message = std::move(l.controls.front());
  l.controls.pop_front();
  note(1, from, to, message.size(), message);
  alive(to)->onControl(from, std::move(message));
}

bool SimNetwork::put(int from, int to, const RemoteSlot& slot, uint32_t immediate, Bytes header,
                     Bytes payload, uint64_t token) {
  Link& l = link(from, to);
  if (l.puts >= kLinkDepth || random_.chance(l.faults.refuse)) return false;
  if (const SimTransport* target = alive(to)) {
    const auto memory = target->locate(slot, header.size() + payload.size());
    std::ranges::fill(memory, static_cast<std::byte>(random_.next()));
  }
  ++l.puts;
  auto flight = std::make_shared<Flight>();
  flight->from = from;
  flight->to = to;
  flight->slot = slot;
  flight->immediate = immediate;
  flight->token = token;
  flight->bytes.assign(header.begin(), header.end());
  flight->payload = payload;

  // Arrival and completion are independent. Either may come first.
  Nanoseconds arrival = clock_.now() + delay(l);
  if (!l.faults.reorder) arrival = std::max(arrival, l.lastPut);
  l.lastPut = std::max(l.lastPut, arrival);
  if (!random_.chance(l.faults.drop)) at(arrival, [this, flight] { deliverPut(flight); });
  at(clock_.now() + delay(l), [this, flight] { completePut(flight); });
  return true;
}

void SimNetwork::readPayload(Flight& flight) {
  if (flight.read) return;
  flight.bytes.insert(flight.bytes.end(), flight.payload.begin(), flight.payload.end());
  flight.read = true;
}

void SimNetwork::deliverPut(const std::shared_ptr<Flight>& flight) {
  Link& l = link(flight->from, flight->to);
  SimTransport* target = alive(flight->to);
  if (alive(flight->from) == nullptr || target == nullptr) return;
  if (const Down* down = outageOf(l)) {
    return hold(l, *down, [this, flight] { deliverPut(flight); });
  }
  readPayload(*flight);
  std::ranges::copy(flight->bytes, target->locate(flight->slot, flight->bytes.size()).begin());
  note(2, flight->from, flight->to, flight->immediate, flight->bytes);
  target->onPut(flight->from, flight->immediate, Bytes(flight->bytes).subspan(kHeaderBytes));
  if (!random_.chance(l.faults.duplicate)) return;
  at(clock_.now() + delay(l), [this, flight] {
    if (SimTransport* t = alive(flight->to)) t->onPut(flight->from, flight->immediate, {});
  });
}

void SimNetwork::completePut(const std::shared_ptr<Flight>& flight) {
  Link& l = link(flight->from, flight->to);
  SimTransport* source = alive(flight->from);
  if (source == nullptr || alive(flight->to) == nullptr) return;
  if (const Down* down = outageOf(l)) {
    return hold(l, *down, [this, flight] { completePut(flight); });
  }
  readPayload(*flight);
  --l.puts;
  note(3, flight->from, flight->to, flight->token);
  source->onPutDone(flight->token);
  if (!random_.chance(l.faults.duplicate)) return;
  at(clock_.now() + delay(l), [this, from = flight->from, token = flight->token] {
    if (SimTransport* s = alive(from)) s->onPutDone(token);
  });
}

void SimNetwork::note(uint64_t what, int from, int to, uint64_t value, Bytes bytes) {
  const auto mix = [this](uint64_t word) { digest_ = Random(digest_ ^ word).next(); };
  mix(what);
  mix(static_cast<uint64_t>(clock_.now()));
  mix(static_cast<uint64_t>(from) << 32 | static_cast<uint32_t>(to));
  mix(value);
  for (; bytes.size() >= 8; bytes = bytes.subspan(8)) {
    uint64_t word;
    std::memcpy(&word, bytes.data(), 8);
    mix(word);
  }
  uint64_t tail = bytes.size();
  for (const std::byte b : bytes) tail = tail << 8 | static_cast<uint8_t>(b);
  mix(tail);
}

}  // namespace smddp::transport::sim
