// A rank is killed in the middle of an allreduce. Ranks are real processes, forked before this one has any thread.
// They meet over pipes; the parent forwards the introductions.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <csignal>

#include "engine/calls.h"
#include "support/watchdog.h"

namespace smddp::test {
namespace {

using testing::HasSubstr;
using Data = std::vector<std::byte>;

constexpr Nanoseconds kTimeout = 40'000'000'000;

void writeAll(int socket, const void* data, size_t bytes) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = send(socket, from, bytes, MSG_NOSIGNAL);
    if (n <= 0) raiseErrno(ErrorKind::Internal, "the parent or a child has gone");
    from += n;
    bytes -= static_cast<size_t>(n);
  }
}
// False at the end of the stream.
bool readAll(int socket, void* data, size_t bytes) {
  return recv(socket, data, bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes);
}
void sendData(int socket, std::span<const std::byte> data) {
  const uint64_t size = data.size();
  writeAll(socket, &size, sizeof size);
  writeAll(socket, data.data(), data.size());
}
std::optional<Data> receiveData(int socket) {
  uint64_t size = 0;
  if (!readAll(socket, &size, sizeof size)) return std::nullopt;
  Data data(size);
  if (size > 0 && !readAll(socket, data.data(), size)) return std::nullopt;
  return data;
}

struct Child {
  pid_t pid = 0;
  int socket = -1;
};

// The report of a survivor: the error of the interrupted call, and that of a later one.
std::vector<std::string> survive(engine::Engine& engine, engine::groups::Group& group,
                                 Block& data) {
  std::vector<std::string> errors;
  for (int i = 0; errors.size() < 2 && i < 100'000; ++i) {
    auto request = allReduce(data.bytes());
    request.timeout = kTimeout;
    request.willWait = true;
    const auto completion = engine.submit(group, std::move(request));
    if (const auto& error = completion->error()) {
      errors.push_back(fmt::format("{}: {}", toString(error->kind()), error->what()));
    }
  }
  return errors;
}

void runChild(int socket, Rank me, const std::vector<std::string>& nodes, bool dies) {
  engine::Engine::Options options;
  options.process.settings.nodeId = nodes[static_cast<size_t>(me)];
  // Never destroyed, because the child ends with _exit.
  auto& engine = *new engine::Engine(options);
  if (nodes.front() != nodes.back())
    engine.progress().call([&] { engine.process().openFabric(nodes.size(), "127.0.0.1"); });
  const auto place = engine.reserve({"doomed", me, static_cast<int>(nodes.size())});
  sendData(socket, bootstrap::serialise(place.introduction));
  std::vector<bootstrap::Introduction> introductions;
  for (Rank r = 0; r < static_cast<Rank>(nodes.size()); ++r) {
    introductions.push_back(bootstrap::parseIntroduction(receiveData(socket).value(), r));
  }
  const auto group = engine.join(place, {introductions, nodes});
  // As in createGroup(): no rank dies, or computes, before the others can detect its death.
  for (bool settled = false; !settled;) {
    engine.progress().call([&] {
      engine.process().peers().check();
      settled = engine.process().peers().unconnectedAmong(introductions).empty();
    });
  }

  Block data(24 << 20);
  for (int i = 0; dies && i < 3; ++i) {
    auto request = allReduce(data.bytes());
    request.timeout = kTimeout;
    request.willWait = i < 2;
    engine.submit(*group, std::move(request));
  }
  // The last call has begun; its other chunks are in flight.
  if (dies) kill(getpid(), SIGKILL);
  for (const auto& text : survive(engine, *group, data)) {
    sendData(socket, std::as_bytes(std::span(text)));
  }
  // Wait until the parent has all reports. If a rank left earlier, the others could report its end instead of the first
  // death, which would also be right.
  receiveData(socket);
}

Child forkChild(Rank me, const std::vector<std::string>& nodes, bool dies) {
  int ends[2];
  SMDDP_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "no socket pair");
  const pid_t pid = fork();
  if (pid == 0) {
    close(ends[0]);
    Watchdog watchdog;
    int status = 1;
    try {
      runChild(ends[1], me, nodes, dies);
      status = 0;
    } catch (const std::exception& error) {
      fprintf(stderr, "rank %d: %s\n", me, error.what());
    }
    _exit(status);
  }
  close(ends[1]);
  return {pid, ends[0]};
}

std::string hostName() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

void checkDeath(const std::vector<std::string>& nodes, Rank victim) {
  const Watchdog watchdog;
  std::vector<Child> children;
  for (Rank r = 0; r < static_cast<Rank>(nodes.size()); ++r) {
    children.push_back(forkChild(r, nodes, r == victim));
  }
  std::vector<Data> introductions;
  for (const Child& child : children) {
    auto introduction = receiveData(child.socket);
    ASSERT_TRUE(introduction) << "a child did not come up";
    introductions.push_back(std::move(*introduction));
  }
  for (const Child& child : children) {
    for (const Data& introduction : introductions) sendData(child.socket, introduction);
  }
  const pid_t dead = children[static_cast<size_t>(victim)].pid;
  for (Rank r = 0; r < static_cast<Rank>(nodes.size()); ++r) {
    for (int i = 0; r != victim && i < 2; ++i) {
      const auto text = receiveData(children[static_cast<size_t>(r)].socket);
      ASSERT_TRUE(text) << "rank " << r << " reported " << i << " errors";
      const std::string error(reinterpret_cast<const char*>(text->data()), text->size());
      EXPECT_THAT(error, HasSubstr("PeerLostError"));
      EXPECT_THAT(error, HasSubstr(fmt::format("rank {} (pid {} on {}) is gone: ", victim, dead,
                                               hostName())));
    }
  }
  for (const Child& child : children) {
    if (child.pid != dead) sendData(child.socket, {});
    close(child.socket);
    int status = 0;
    waitpid(child.pid, &status, 0);
    if (child.pid == dead) {
      EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    } else {
      EXPECT_EQ(status, 0);
    }
  }
}

TEST(ProcessDeathTest, OnTheSameNode) { checkDeath({"a", "a", "a"}, 1); }
TEST(ProcessDeathTest, OnAnotherNode) { checkDeath({"a", "b", "c"}, 2); }
TEST(ProcessDeathTest, OnBoth) { checkDeath({"a", "a", "b", "b"}, 3); }

}  // namespace
}  // namespace smddp::test
