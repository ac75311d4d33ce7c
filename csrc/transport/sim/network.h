// A network inside one process: every transport on it, every message under way, one virtual clock,
// one seed.
//
// Nothing happens by itself. A message is an event at a time drawn from the seed; advance() takes
// the next event and sets the clock to its time. The same calls with the same seed give the same
// events, byte for byte (digest()).
//
// It is harsher than any real network within the contract of transport.h: the target slot is
// scribbled over as soon as a put is accepted, and its payload is read as late as possible, so that
// a credit or a completion that came too early shows as wrong data.
//
// Threads: one. Ends: after all its transports.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <string>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "transport/sim/random.h"
#include "transport/transport.h"

namespace smddp::transport::sim {

class SimTransport;

class VirtualClock final : public Clock {
 public:
  Nanoseconds now() const override { return now_; }

 private:
  friend class SimNetwork;
  Nanoseconds now_ = 0;
};

// What goes wrong on a link from one transport to another. Probabilities are per message.
struct Faults {
  Nanoseconds minDelay = 1'000;
  Nanoseconds maxDelay = 20'000;
  bool reorder = true;   // puts overtake each other (control messages of a link never do)
  double duplicate = 0;  // a completion is reported twice, the second time later
  double drop = 0;       // the message never arrives, although the sender is told that it went out
  double refuse = 0;     // "no room now"
};

enum class Outage {
  Hold,  // messages wait until the link is up again
  Drop,  // messages vanish, and the sender hears nothing
};

class SimNetwork {
 public:
  static constexpr Nanoseconds kForever = std::numeric_limits<Nanoseconds>::max();

  explicit SimNetwork(uint64_t seed, const Faults& faults = {});
  ~SimNetwork();
  SimNetwork(const SimNetwork&) = delete;
  SimNetwork& operator=(const SimNetwork&) = delete;

  // Transports are numbered 0, 1, … in the order of their creation; a number is not used again.
  std::unique_ptr<SimTransport> create(const std::string& name);

  const VirtualClock& clock() const { return clock_; }
  // Takes the next event. False: there is none, and nothing will happen before somebody calls a
  // transport.
  bool advance();
  // Takes all events up to `time` and sets the clock to it.
  void advanceTo(Nanoseconds time);
  // For the script of a test: calls `action` at that time, as an event.
  void at(Nanoseconds time, std::function<void()> action);

  // For messages that are given to the link from now on.
  void setFaults(int from, int to, const Faults& faults);
  // Both directions between a and b are down in [from, until).
  void partition(int a, int b, Nanoseconds from, Nanoseconds until, Outage outage);
  // The transport stops without a word: what it has under way vanishes, it accepts and reports
  // nothing more. Peers connected by then are told after `detection`, or never.
  void kill(int endpoint, std::optional<Nanoseconds> detection);

  // A hash of everything that happened so far: times, places and bytes.
  uint64_t digest() const { return digest_; }

 private:
  friend class SimTransport;
  // Puts, and control messages, that may be under way on a link; more are refused.
  static constexpr int kLinkDepth = 256;

  struct Event {
    Nanoseconds time;
    uint64_t number;  // breaks ties: first scheduled, first served
    std::function<void()> action;
    bool operator>(const Event& other) const {
      return std::pair(time, number) > std::pair(other.time, other.number);
    }
  };
  struct Down {
    Nanoseconds from, until;
    Outage outage;
  };
  struct Link {
    Faults faults;
    std::vector<Down> downs;
    std::deque<std::vector<std::byte>> controls;  // under way
    int puts = 0;                                 // under way
    Nanoseconds lastPut = 0;                      // when the latest of them arrives
  };
  struct Flight;  // one put

  bool control(int from, int to, Bytes message);
  bool put(int from, int to, const RemoteSlot& slot, uint32_t immediate, Bytes header,
           Bytes payload, uint64_t token);
  void remove(int endpoint);

  void deliverControl(int from, int to);
  void deliverPut(const std::shared_ptr<Flight>& flight);
  void completePut(const std::shared_ptr<Flight>& flight);
  void readPayload(Flight& flight);
  // The outage that the link suffers from now, or null.
  const Down* outageOf(const Link& link) const;
  // Does `again` after the outage, if it holds messages and ends.
  void hold(const Link& link, const Down& down, std::function<void()> again);

  Link& link(int from, int to);
  SimTransport* alive(int endpoint) { return endpoints_.at(static_cast<size_t>(endpoint)); }
  Nanoseconds delay(const Link& link);
  void note(uint64_t what, int from, int to, uint64_t value, Bytes bytes = {});

  VirtualClock clock_;
  Random random_;
  const Faults faults_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  uint64_t lastNumber_ = 0;
  std::vector<SimTransport*> endpoints_;  // null once killed or destroyed
  std::map<std::pair<int, int>, Link> links_;
  uint64_t digest_ = 0;
};

}  // namespace smddp::transport::sim
