// A simulated network inside one process, with a virtual clock and a seed.
//
// Nothing happens by itself. Every message is an event at a random time that follows from the seed. advance() takes
// the next event and sets the clock to its time. The same calls with the same seed give the same events, byte for byte
// (digest()).
//
// Within the contract of transport.h it is harsher than any real network: it overwrites the target slot as soon as a
// put is accepted, and reads the payload as late as possible. So a credit or a completion that comes too early leads
// to wrong data, which a test sees.
//
// Threads: one. Destroy it after all its transports.
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

// The faults of a link from one transport to another. Probabilities are per message.
struct Faults {
  Nanoseconds minDelay = 1'000;
  Nanoseconds maxDelay = 20'000;
  bool reorder = true;   // puts overtake each other (control messages of a link never do)
  double duplicate = 0;  // a completion is reported twice, the second time later
  double drop = 0;       // the message never arrives, although its completion is reported
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

  // Makes a transport. They are numbered 0, 1, … in the order of their creation; numbers are not reused.
  std::unique_ptr<SimTransport> create(const std::string& name);

  const VirtualClock& clock() const { return clock_; }
  // Takes the next event. False: there is none, and there will be none until a transport is called.
  bool advance();
  // Takes all events up to `time` and sets the clock to it.
  void advanceTo(Nanoseconds time);
  // For tests: calls `action` at that time, as an event.
  void at(Nanoseconds time, std::function<void()> action);

  // Sets the faults for messages that are sent on the link from now on.
  void setFaults(int from, int to, const Faults& faults);
  // Takes both directions between a and b down in [from, until).
  void partition(int a, int b, Nanoseconds from, Nanoseconds until, Outage outage);
  // Stops a transport silently: its messages in flight vanish, and it accepts and reports nothing more. Peers that are
  // connected then are told after `detection`, or never.
  void kill(int endpoint, std::optional<Nanoseconds> detection);

  // A hash of everything that happened so far: times, places and bytes.
  uint64_t digest() const { return digest_; }

 private:
  friend class SimTransport;
  // The number of puts, and of control messages, that may be in flight on a link. More are refused.
  static constexpr int kLinkDepth = 256;

  struct Event {
    Nanoseconds time;
    uint64_t number;  // orders events at the same time: first scheduled, first served
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
    std::deque<std::vector<std::byte>> controls;  // in flight
    int puts = 0;                                 // in flight
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
  // The outage of the link at the present time, or null.
  const Down* outageOf(const Link& link) const;
  // Schedules `again` for after the outage. Does nothing if the outage drops messages or never ends.
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
