// Fuzzes a rank of a group: what other ranks publish for the group, what the rank of another node sends, and what the
// mate on its own node writes into the memory that they share.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/ownership.h"
#include "engine/groups/group.h"
#include "engine/groups/group_registry.h"
#include "engine/memory/region.h"
#include "engine/process/process.h"
#include "hostile_transport.h"
#include "script.h"
#include "support/small_settings.h"

namespace {

using namespace smddp;
using namespace smddp::engine;
using smddp::fuzz::HostileTransport;
using smddp::fuzz::Script;
using transport::ControlHeader;
using Blob = std::vector<std::byte>;

constexpr Nanoseconds kTimeout = 1'000'000'000;

class ScriptClock final : public Clock {
 public:
  Nanoseconds now() const override { return now_; }
  void advance(Nanoseconds by) { now_ += by; }

 private:
  Nanoseconds now_ = 1;
};

// One of the two processes of our node, and its group of two or three ranks: we are rank 0, the mate is rank 1, and
// rank 2 is on another node.
struct Player {
  Player(Rank me, int size, const std::shared_ptr<ScriptClock>& clock) {
    (void)ownership.tryAcquire();
    process::Process::Options options;
    options.settings = test::smallSettings();
    options.settings.nodeId = "a";
    options.clock = clock;
    options.fabric = [this] {
      auto made = std::make_unique<HostileTransport>();
      network = made.get();
      return made;
    };
    options.id = process::ProcessId{static_cast<std::byte>(1 + me)};
    options.slabBytes = size_t{64} << 20;
    options.lifelines = false;
    process.emplace(std::move(options), ownership);
    process->openFabric(1, "127.0.0.1");
    registry.emplace(ownership, *process);
    place.emplace(*process, std::make_shared<const collectives::Tuning>(),
                  groups::GroupSpec{"g", me, size});
  }

  void join(const std::vector<bootstrap::Introduction>& all) {
    std::vector<std::string> nodes{"a", "a", "b"};
    nodes.resize(all.size());
    group = std::make_shared<groups::Group>(*process, *place, groups::Members{all, nodes});
  }
  void submit(calls::Message message) {
    group->submit(std::move(message), std::make_shared<calls::Completion>());
    registry->activate(*group);
  }
  void submit(calls::Request request) {
    group->operations.submit(std::move(request), std::make_shared<calls::Completion>());
    registry->activate(*group);
  }
  // Where mates read what this process tells its group.
  std::span<std::byte> region() {
    const team::GroupEntry entry = team::GroupEntry::decode(place->introduction);
    return {process->memory().slab->data() + entry.regionOffset, entry.regionBytes};
  }

  Ownership ownership;
  HostileTransport* network = nullptr;
  std::optional<process::Process> process;
  std::optional<groups::GroupRegistry> registry;
  std::optional<groups::Place> place;
  std::shared_ptr<groups::Group> group;
};

void overwrite(Script& script, std::span<std::byte> memory) {
  const auto bytes = script.piece();
  const size_t at = script.number<uint16_t>() % memory.size();
  std::copy_n(bytes.begin(), std::min(bytes.size(), memory.size() - at),
              memory.begin() + static_cast<std::ptrdiff_t>(at));
}

// A control message that mostly has our version and the number of our group, and a length that fits.
Blob message(Script& script, uint64_t group) {
  const bool isRaw = script.byte() % 4 == 0;
  const auto given = script.piece();
  Blob bytes(given.begin(), given.end());
  if (isRaw || bytes.size() < sizeof(ControlHeader) + sizeof group) return bytes;
  ControlHeader header;
  std::memcpy(&header, bytes.data(), sizeof header);
  header.version = transport::kWireVersion;
  const bool isAbort = header.kind == static_cast<uint8_t>(transport::ControlKind::Abort);
  if (isAbort && bytes.size() >= sizeof(transport::AbortMessage)) {
    header.tailBytes = static_cast<uint32_t>(bytes.size() - sizeof(transport::AbortMessage));
  }
  std::memcpy(bytes.data(), &header, sizeof header);
  std::memcpy(bytes.data() + sizeof header, &group, sizeof group);
  return bytes;
}

calls::Message messageOf(Script& script, uint8_t what, Rank last, std::vector<Blob>& buffers) {
  buffers.emplace_back(script.byte());
  calls::Message message;
  message.send = what >= 128;
  message.peer = what / 16 % 2 == 0 ? last : 1;
  if (!message.send && what / 32 % 2 != 0) message.peer = calls::kAnySource;
  message.buffered = message.send && what / 32 % 2 != 0;
  message.tag = script.byte() % 2;
  message.buffer = {buffers.back()};
  message.timeout = kTimeout;
  return message;
}

// A collective of the player. The memory of its tensors may be such that mates read it, which takes long to make.
calls::Request requestOf(Player& player, uint8_t what, bool mayShare, std::vector<Blob>& buffers) {
  using collectives::Collective;
  calls::Request request;
  request.timeout = kTimeout;
  request.type = DataType::float32;
  if (what / 16 % 4 == 0) return request;  // a barrier
  request.collective = what / 16 % 4 == 1 ? Collective::Broadcast : Collective::AllReduce;
  request.root = 1;
  request.bytes = what / 16 % 4 == 3 ? 4096 : 64;
  const auto bytes = static_cast<size_t>(request.bytes);
  if (mayShare && what >= 128) {
    auto* const shared = player.process->memory().tensors->allocate(bytes);
    request.output = {{static_cast<std::byte*>(shared), bytes}};
  } else {
    buffers.emplace_back(bytes);
    request.output = {buffers.back()};
  }
  return request;
}

void run(Script& script) {
  const auto clock = std::make_shared<ScriptClock>();
  std::vector<Blob> buffers;
  // Operations refer to the buffers, so these must not move.
  buffers.reserve(2 * script.left() + 1);
  const uint8_t published = script.byte();
  const int size = (published & 128) != 0 ? 2 : 3;
  Player we(0, size, clock), mate(1, size, clock);

  std::vector<bootstrap::Introduction> all{we.place->introduction, mate.place->introduction,
                                           mate.place->introduction};
  all[2].processId = process::ProcessId{std::byte{9}};
  for (const size_t rank : {1, 2}) {
    if ((published >> rank & 1) == 0) continue;
    const auto bytes = script.piece();
    Blob& entry = all[rank].group;
    std::copy_n(bytes.begin(), std::min(bytes.size(), entry.size()), entry.begin());
    if ((published & 8) != 0) entry.resize(bytes.size());
  }
  if ((published & 16) != 0) all[1].slab.resize(script.byte());
  all.resize(static_cast<size_t>(size));
  // The mate obeys the protocol until it begins to write into its memory.
  bool isHonest = published % 32 == 0;
  we.join(all);
  const bool mayShare = (published & 64) != 0;
  const uint64_t id = we.group->membership.group;
  const auto receive = [&] {
    if (size < 3) return;
    we.network->deliver([&](transport::Sink& sink) { sink.onControl(0, message(script, id)); });
    (void)we.process->poll();
  };
  // Rank 2 may know the group before we do.
  if ((published & 32) != 0) receive();
  we.registry->add(we.group);
  if (isHonest) {
    mate.join(all);
    mate.registry->add(mate.group);
  }
  while (!script.done()) {
    const uint8_t what = script.byte();
    switch (what % 16) {
      case 0: we.submit(messageOf(script, what, size - 1, buffers)); break;
      case 1:
        we.submit(requestOf(we, what, mayShare, buffers));
        if (isHonest) mate.submit(requestOf(mate, what, mayShare, buffers));
        break;
      case 2: receive(); break;
      case 3:
        we.network->deliver([value = script.number<uint32_t>()](auto& sink) { sink.onPut(value); });
        (void)we.process->poll();
        break;
      case 4:
        we.network->deliver(
            [value = script.number<uint64_t>()](auto& sink) { sink.onPutDone(value); });
        (void)we.process->poll();
        break;
      case 5:
        if (!we.network->windows().empty()) overwrite(script, we.network->windows().back());
        break;
      case 6:
        isHonest = false;
        overwrite(script, mate.region());
        break;
      case 7:
        clock->advance(Nanoseconds{script.number<uint16_t>()} * 100'000);
        we.registry->checkHealth();
        break;
      case 8:
        if (isHonest) (void)mate.registry->advance();
        break;
      case 9:
        if (size < 3) break;
        we.network->deliver([](auto& sink) { sink.onPeerFailed(0, "it is gone"); });
        (void)we.process->poll();
        break;
      case 11:
        if (what >= 16) {
          we.registry->reap();
        } else {
          we.registry->leave(we.group);
        }
        break;
      case 12:
        if (isHonest) mate.registry->leave(mate.group);
        break;
      case 10: we.network->setFull(what >= 128); break;
      default: (void)we.registry->advance();
    }
  }
  (void)we.registry->advance();
  calls::Leftovers leftovers;
  we.registry->leaveAll();
  we.registry->moveLeftoversTo(leftovers);
  we.registry->reap();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Script script(data, size);
  try {
    run(script);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::Internal) std::abort();
  }
  return 0;
}
