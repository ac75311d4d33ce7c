// Fuzzes connections to a lifeline, and those that it makes: the bytes that the other side sends, in which pieces, and
// when it closes.
#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <vector>

#include "bootstrap/lifeline.h"
#include "common/error.h"
#include "script.h"

namespace {

using namespace smddp;
using namespace smddp::bootstrap;

ProcessId process(uint8_t number) {
  ProcessId id{};
  id.front() = static_cast<std::byte>(number);
  return id;
}

FileDescriptor visit(const Endpoint& endpoint) {
  FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  // Closes with a reset, so that thousands of connections a second leave no ports in use.
  const linger none{1, 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &none, sizeof none);
  if (::connect(socket.get(), endpoint.address(), endpoint.size()) != 0) return {};
  ::fcntl(socket.get(), F_SETFL, O_NONBLOCK);
  return socket;
}

// Where the lifeline finds peers that it must connect to.
struct Door {
  FileDescriptor listener{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)};
  Endpoint endpoint = parseNumericAddress("127.0.0.1");

  Door() {
    socklen_t size = sizeof endpoint.storage;
    if (::bind(listener.get(), endpoint.address(), endpoint.size()) != 0 ||
        ::listen(listener.get(), 64) != 0 ||
        ::getsockname(listener.get(), endpoint.address(), &size) != 0) {
      std::abort();
    }
  }
  // The next connection of the lifeline; none if there is none.
  FileDescriptor open() {
    FileDescriptor socket(
        ::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    const linger none{1, 0};
    if (socket) ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &none, sizeof none);
    return socket;
  }
};

// One for all inputs, because thousands of them a second would use up the ports.
Door& theDoor() {
  static auto* const door = new Door;
  return *door;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Script script(data, size);
  constexpr uint8_t kSelf = 200;
  Lifeline::Options options;
  options.maxHalfOpen = 4;
  if (script.byte() % 2 != 0) options.seal = Seal("not in any corpus: 93b1");
  Lifeline line(process(kSelf), "127.0.0.1", options);
  const Endpoint endpoint = parseLifelineAddress(line.address(), "the lifeline").endpoint;
  std::vector<FileDescriptor> visitors;
  std::set<ProcessId> introduced;
  size_t departed = 0;
  const auto poll = [&] { line.poll([&](const Lifeline::Departure&) { ++departed; }); };
  while (!script.done()) {
    const uint8_t what = script.byte();
    FileDescriptor* visitor = visitors.empty() ? nullptr : &visitors[what / 8 % visitors.size()];
    switch (what % 8) {
      case 0:
        if (visitors.size() < 8) visitors.push_back(visit(endpoint));
        break;
      case 1:
        // Processes with smaller numbers must connect to us.
        line.connect(serialise(LifelineAddress{endpoint, process(1 + what / 8)}), "a peer");
        introduced.insert(process(1 + what / 8));
        break;
      case 2:
        if (visitor != nullptr) *visitor = FileDescriptor();
        break;
      case 3: poll(); break;
      case 4: {
        // It must connect to processes with greater numbers. One that is introduced again is connected to once.
        const ProcessId peer = process(kSelf + 1 + what / 8);
        line.connect(serialise(LifelineAddress{theDoor().endpoint, peer}), "a peer");
        introduced.insert(peer);
        if (visitors.size() < 8) visitors.push_back(theDoor().open());
        break;
      }
      default: {
        const auto bytes = script.piece();
        if (visitor != nullptr && *visitor) {
          (void)!::send(visitor->get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
        }
      }
    }
    const auto expected = std::count_if(introduced.begin(), introduced.end(),
                                        [&](const auto& peer) { return line.isExpected(peer); });
    if (line.numConnected() + expected > introduced.size()) std::abort();
    if (!options.seal.isEmpty() && line.numConnected() > 0) std::abort();
  }
  poll();
  line.leave();
  while (theDoor().open()) {
  }
  if (departed > introduced.size()) std::abort();
  return 0;
}
