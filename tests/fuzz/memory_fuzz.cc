// Fuzzes shared memory: a mate writes anything into rings, its control page, and the locations of its tensors.
#include <cstdlib>
#include <cstring>
#include <memory>

#include "common/error.h"
#include "script.h"
#include "transport/shm/comm_memory.h"
#include "transport/shm/liveness.h"
#include "transport/shm/ring.h"
#include "transport/shm/shm_transport.h"

namespace {

using namespace smddp;
using namespace smddp::transport;
using namespace smddp::transport::shm;
using smddp::fuzz::Script;

struct Nobody final : Sink {
  void onControl(PeerId from, Bytes message) override {
    if (from != 0 || message.size() > kMaxControlBytes) std::abort();
  }
  void onPut(uint32_t) override {}
  void onPutDone(uint64_t) override {}
  void onPeerFailed(PeerId, const std::string& cause) override {
    if (cause.empty()) std::abort();
  }
};

// Two processes in one: ours, and the mate, whose writes the input determines.
struct Node {
  std::shared_ptr<Slab> ours = Slab::create(Slab::kLeastReserve);
  std::shared_ptr<Slab> mates = Slab::create(Slab::kLeastReserve);
};

// One node for all inputs, because to make one takes longer than to run an input.
Node& theNode() {
  static auto* const node = [] {
    auto* const made = new Node;
    // The first transport of a process makes its rings, the others use them.
    for (const auto& slab : {made->ours, made->mates}) ShmTransport first(slab);
    return made;
  }();
  return *node;
}

RingTable& ringsOf(Slab& slab) {
  return *reinterpret_cast<RingTable*>(slab.data() + slab.page().ringsOffset.load());
}

template <typename T>
void overwrite(Script& script, std::atomic<T>& word) {
  word.store(script.number<T>());
}

void writeInto(Script& script, Ring& ring) {
  const auto bytes = script.piece();
  ring.copyIn(script.number<uint16_t>(), bytes);
}

// Changes everything that the mate can write in our memory, and what we read in its memory. It leaves the mate's pid
// and descriptors alone, because with other values files of other processes would be opened.
void play(Script& script, Ring& incoming, Ring& outgoing, Node& node) {
  ProcessPage& page = node.mates->page();
  switch (script.byte() % 9) {
    case 0: writeInto(script, incoming); break;
    case 1: overwrite(script, incoming.head); break;
    case 2: incoming.head.store(script.byte() * Ring::kGranule); break;
    case 3: overwrite(script, incoming.refused); break;
    case 4: overwrite(script, outgoing.tail); break;
    case 5: overwrite(script, page.life); break;
    case 6: overwrite(script, page.ringsGeneration); break;
    case 7: overwrite(script, page.ringsOffset); break;
    default: page.commSegments[script.byte()].store(script.number<uint64_t>() | 1);
  }
}

void locate(Script& script, Node& node) {
  MateMemory memory(Mate::attach(node.mates->address()));
  auto location = script.number<Location>();
  if (script.byte() % 2 != 0) location.segment = node.mates->address();
  location.segment.pid = node.mates->address().pid;
  if (location.index < ProcessPage::kMaxCommSegments && script.byte() % 2 != 0) {
    uint64_t tag = 0;
    std::memcpy(&tag, location.segment.nonce.data(), sizeof tag);
    node.mates->page().commSegments[location.index].store(tag | 1);
  }
  const size_t bytes = script.number<uint32_t>();
  if (script.byte() % 4 == 3) location.segment.bytes = script.number<uint64_t>();
  std::byte* const found = memory.resolve(location, bytes);
  if (found < node.mates->data() || found + bytes > node.mates->data() + node.mates->size()) {
    std::abort();
  }
}

// Restores the state for the next input.
struct Restorer {
  Node& node;
  const uint64_t ringsOffset = node.mates->page().ringsOffset.load();

  ~Restorer() {
    for (Slab* slab : {node.ours.get(), node.mates.get()}) {
      ProcessPage& page = slab->page();
      page.life.store(Life::Running);
      page.ringsGeneration.store(0);
      if (slab == node.mates.get() && ringsOffset != 0) page.ringsOffset.store(ringsOffset);
      RingTable& rings = ringsOf(*slab);
      Ring& first = rings.rings[0];
      rings.claim(first).state.store(RingState::Free);
      first.head.store(0);
      first.tail.store(0);
      first.refused.store(0);
    }
  }
};

void run(Script& script, bool isWrongAddress) {
  Node& node = theNode();
  const Restorer restorer{node};
  Nobody sink;
  ShmTransport mate(node.mates);
  ShmTransport we(node.ours);
  (void)mate.connect(we.address(), "we");
  auto address = mate.address();
  // It must name our own files, so pid and descriptor stay.
  if (isWrongAddress) {
    constexpr size_t kKept = offsetof(SegmentAddress, bytes);
    const auto bytes = script.piece();
    const size_t at = kKept + script.byte() % (address.size() - kKept);
    std::copy_n(bytes.begin(), std::min(bytes.size(), address.size() - at),
                address.begin() + static_cast<std::ptrdiff_t>(at));
    if (script.byte() % 8 == 0) address.resize(script.byte());
  }
  const PeerId peer = we.connect(address, "the mate");
  Ring& incoming = ringsOf(*node.ours).rings[0];
  Ring& outgoing = ringsOf(*node.mates).rings[0];
  const std::byte payload[24] = {};
  while (!script.done()) {
    switch (script.byte() % 4) {
      case 0: (void)we.control(peer, script.piece()); break;
      case 1:
        (void)we.put(peer, script.number<RemoteSlot>(), 1, std::vector<std::byte>(kHeaderBytes),
                     payload, 1);
        break;
      case 2: (void)we.poll(sink); break;
      default: play(script, incoming, outgoing, node);
    }
  }
  (void)we.poll(sink);
  (void)describeLife(*Mate::attach(node.mates->address()));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Script script(data, size);
  try {
    const uint8_t what = script.byte();
    if (what % 4 == 0) {
      locate(script, theNode());
    } else {
      run(script, what % 4 == 3);
    }
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::Internal) std::abort();
  }
  return 0;
}
