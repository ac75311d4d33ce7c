#include "bootstrap/lifeline.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <random>

#include "common/error.h"

namespace smddp::bootstrap {
namespace {

using testing::HasSubstr;

constexpr Nanoseconds kNever = 3'600'000'000'000;
constexpr Nanoseconds kSoon = 100'000'000;

// Ids in a known order: process(1) < process(2).
ProcessId process(int number) {
  ProcessId id{};
  id.front() = static_cast<std::byte>(number);
  return id;
}

// A lifeline and the events that it has reported.
struct Side {
  explicit Side(int number, const Lifeline::Options& options = {.connectTimeout = kNever})
      : line(std::make_unique<Lifeline>(process(number), "127.0.0.1", options)) {}
  void poll() {
    if (line) line->poll([this](const Lifeline::Departure& d) { departures.push_back(d); });
  }
  void meet(const Side& other) { line->connect(other.line->address(), "a peer"); }
  std::unique_ptr<Lifeline> line;
  std::vector<Lifeline::Departure> departures;
};

// Polls all sides until the condition holds; false after 20 s. Sleeps on the descriptors between polls.
bool pollUntil(const std::vector<Side*>& sides, const std::function<bool()>& condition) {
  const MonotonicClock clock;
  const Deadline deadline = Deadline::after(clock, 20'000'000'000);
  while (!condition()) {
    if (deadline.passed(clock)) return false;
    std::vector<pollfd> fds;
    for (const Side* side : sides) {
      if (side->line) fds.push_back({side->line->descriptor(), POLLIN, 0});
    }
    ::poll(fds.data(), fds.size(), 20);
    for (Side* side : sides) side->poll();
  }
  return true;
}

bool areConnected(Side& a, Side& b) {
  return pollUntil({&a, &b}, [&] { return a.line->numConnected() + b.line->numConnected() == 2; });
}

// A client that does not follow the protocol.
class RawClient {
 public:
  explicit RawClient(const Lifeline& to) {
    const auto address = parseLifelineAddress(to.address(), "the lifeline under test");
    socket_ = FileDescriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(socket_.get(), address.endpoint.address(), address.endpoint.size()), 0);
    ::fcntl(socket_.get(), F_SETFL, O_NONBLOCK);
  }
  void resetWhenClosed() {
    const linger none{1, 0};
    EXPECT_EQ(::setsockopt(socket_.get(), SOL_SOCKET, SO_LINGER, &none, sizeof none), 0);
  }
  void send(std::span<const std::byte> bytes) {
    (void)::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  // Reads all bytes. True when the other side has closed the connection.
  bool hasHungUp() {
    std::byte buffer[256];
    const auto got = ::recv(socket_.get(), buffer, sizeof(buffer), 0);
    if (got > 0) numReceived += got;
    return got == 0 || (got < 0 && errno != EAGAIN);
  }
  size_t numReceived = 0;

 private:
  FileDescriptor socket_;
};

size_t numOpenDescriptors() {
  const auto entries = std::filesystem::directory_iterator("/proc/self/fd");
  return std::distance(begin(entries), end(entries));
}

TEST(Lifeline, ConnectsWhoeverIsIntroducedFirst) {
  for (const bool smallerFirst : {true, false}) {
    Side one(1), two(2);
    Side& first = smallerFirst ? one : two;
    Side& second = smallerFirst ? two : one;
    first.meet(second);
    // The first one connects, or waits, before the second one knows of it.
    for (int i = 0; i < 20; ++i) {
      one.poll();
      two.poll();
    }
    second.meet(first);
    ASSERT_TRUE(areConnected(one, two));
    EXPECT_TRUE(one.departures.empty() && two.departures.empty());
  }
}

TEST(Lifeline, APairHasOneConnection) {
  Side one(1), two(2);
  const size_t before = numOpenDescriptors();
  for (int i = 0; i < 3; ++i) {
    one.meet(two);
    two.meet(one);
    one.meet(one);
  }
  ASSERT_TRUE(areConnected(one, two));
  EXPECT_EQ(numOpenDescriptors(), before + 2);  // its two ends
}

TEST(Lifeline, EveryPeerHearsOfALeaverOnce) {
  std::vector<std::unique_ptr<Side>> sides;
  std::vector<Side*> all;
  for (int i = 1; i <= 8; ++i) sides.push_back(std::make_unique<Side>(i));
  for (auto& side : sides) all.push_back(side.get());
  for (Side* a : all) {
    for (Side* b : all) a->meet(*b);
  }
  const auto everybody = [&](size_t count) {
    return std::all_of(all.begin(), all.end(),
                       [&](Side* side) { return side->line->numConnected() == count; });
  };
  ASSERT_TRUE(pollUntil(all, [&] { return everybody(7); }));
  sides[4]->line->leave();
  all.erase(all.begin() + 4);
  ASSERT_TRUE(pollUntil(all, [&] { return everybody(6); }));
  for (Side* side : all) {
    for (int i = 0; i < 5; ++i) side->poll();
    ASSERT_EQ(side->departures.size(), 1U);
    EXPECT_EQ(side->departures[0].process, process(5));
    EXPECT_TRUE(side->departures[0].orderly);
  }
}

TEST(Lifeline, LeavingBeforeThePeerIsReadyIsStillOrderly) {
  // Number 2 has accepted 1, but was not told to connect. Number 1 is connected, or nearly.
  Side one(1), two(2);
  one.meet(two);
  for (int i = 0; i < 20; ++i) {
    one.poll();
    two.poll();
  }
  two.line->leave();
  ASSERT_TRUE(pollUntil({&one}, [&] { return !one.departures.empty(); }));
  EXPECT_TRUE(one.departures[0].orderly) << one.departures[0].cause;
}

TEST(Lifeline, DestructionWithoutLeaveIsADeath) {
  for (const int dying : {1, 2}) {
    Side one(1), two(2);
    one.meet(two);
    two.meet(one);
    ASSERT_TRUE(areConnected(one, two));
    Side& survivor = dying == 1 ? two : one;
    (dying == 1 ? one : two).line.reset();
    ASSERT_TRUE(pollUntil({&survivor}, [&] { return !survivor.departures.empty(); }));
    EXPECT_FALSE(survivor.departures[0].orderly);
    EXPECT_EQ(survivor.departures[0].process, process(dying));
    EXPECT_THAT(survivor.departures[0].cause, HasSubstr("its process ended"));
  }
}

TEST(Lifeline, APeerThatDiedBeforeWeWereIntroducedIsNoticedThen) {
  Side one(1), two(2);
  one.meet(two);
  for (int i = 0; i < 20; ++i) {
    one.poll();
    two.poll();
  }
  const auto address = one.line->address();
  one.line.reset();
  two.line->connect(address, "a peer");
  ASSERT_TRUE(pollUntil({&two}, [&] { return !two.departures.empty(); }));
  EXPECT_FALSE(two.departures[0].orderly);
}

TEST(Lifeline, APeerThatIsGoneDeparts) {
  Side one(1), two(2);
  const auto address = two.line->address();
  two.line.reset();
  one.line->connect(address, "a peer");
  ASSERT_TRUE(pollUntil({&one}, [&] { return !one.departures.empty(); }));
  EXPECT_FALSE(one.departures[0].orderly);
  EXPECT_THAT(one.departures[0].cause, HasSubstr("refused"));
}

TEST(Lifeline, APeerThatNeverConnectsDepartsAtTheDeadline) {
  // Test both sides: 2 waits until 1 connects; 1 waits for the hello of 2.
  Side one(1, {.connectTimeout = kSoon}), two(2, {.connectTimeout = kSoon}), three(3);
  one.meet(three);
  two.meet(one);
  ASSERT_TRUE(pollUntil({&one, &two, &three},
                        [&] { return one.departures.size() + two.departures.size() == 2; }));
  EXPECT_THAT(two.departures[0].cause, HasSubstr("did not connect within 0.1 s"));
  EXPECT_THAT(one.departures[0].cause, HasSubstr("could not be reached within 0.1 s"));
}

TEST(Lifeline, APortThatBelongsToAnotherProcessNowIsFoundOut) {
  Side one(1), three(3);
  LifelineAddress stale = parseLifelineAddress(three.line->address(), "three");
  stale.process = process(2);
  one.line->connect(serialise(stale), "two");
  ASSERT_TRUE(pollUntil({&one, &three}, [&] { return !one.departures.empty(); }));
  EXPECT_EQ(one.departures[0].process, process(2));
  EXPECT_FALSE(one.departures[0].orderly);
  EXPECT_TRUE(three.departures.empty());
}

TEST(Lifeline, StrangersAreDroppedWithoutAReply) {
  Side one(1), two(2);
  one.meet(two);
  two.meet(one);
  ASSERT_TRUE(areConnected(one, two));
  for (uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    // Garbage; a hello to somebody else; the hello of a peer that is connected already.
    std::vector<std::byte> bytes(kHelloBytes + random() % 40);
    for (auto& b : bytes) b = static_cast<std::byte>(random());
    if (seed % 3 == 1) bytes = serialise(Hello{process(1), process(7)});
    if (seed % 3 == 2) bytes = serialise(Hello{process(1), process(2)});
    RawClient client(*two.line);
    client.send(bytes);
    ASSERT_TRUE(pollUntil({&one, &two}, [&] { return client.hasHungUp(); })) << "seed " << seed;
    EXPECT_EQ(client.numReceived, 0U) << "seed " << seed;
  }
  EXPECT_EQ(two.line->numConnected(), 1U);
  EXPECT_TRUE(two.departures.empty());
}

TEST(Lifeline, BytesAfterTheHelloEndAConnection) {
  Side two(2);
  two.line->connect(Side(1).line->address(), "one");
  RawClient one(*two.line);
  one.send(serialise(Hello{process(1), process(2)}));
  ASSERT_TRUE(pollUntil({&two}, [&] { return two.line->numConnected() == 1; }));
  const std::byte strange{0};
  one.send({&strange, 1});
  ASSERT_TRUE(pollUntil({&two}, [&] { return !two.departures.empty(); }));
  EXPECT_FALSE(two.departures[0].orderly);
  EXPECT_THAT(two.departures[0].cause, HasSubstr("bytes"));
}

TEST(Lifeline, AHelloMayArriveByteByByte) {
  Side two(2);
  two.line->connect(Side(1).line->address(), "one");
  RawClient one(*two.line);
  for (const std::byte b : serialise(Hello{process(1), process(2)})) {
    EXPECT_EQ(two.line->numConnected(), 0U);
    one.send({&b, 1});
    two.poll();
  }
  ASSERT_TRUE(pollUntil({&two}, [&] { return two.line->numConnected() == 1; }));
}

TEST(Lifeline, SilentVisitorsAreBoundedAndShutOutNobody) {
  Side one(1);
  Side two(2, {.handshakeTimeout = kSoon, .connectTimeout = kNever, .maxHalfOpen = 4});
  std::vector<std::unique_ptr<RawClient>> silent;
  for (int i = 0; i < 20; ++i) silent.push_back(std::make_unique<RawClient>(*two.line));
  const size_t before = numOpenDescriptors();
  one.meet(two);
  two.meet(one);
  size_t most = 0;
  ASSERT_TRUE(pollUntil({&one, &two}, [&] {
    most = std::max(most, numOpenDescriptors());
    return one.line->numConnected() == 1;
  }));
  EXPECT_LE(most, before + 4 + 2);  // four visitors and both ends of the true connection
  for (auto& client : silent) {
    ASSERT_TRUE(pollUntil({&one, &two}, [&] { return client->hasHungUp(); }));
    EXPECT_EQ(client->numReceived, 0U);
  }
  EXPECT_TRUE(two.departures.empty());
}

// The kernel answers whoever asks whether this host is there, also while the process does not run.
TEST(Lifeline, VisitorsThatOnlyAskTheKernelAreNotSeen) {
  Side one(1);
  Side two(2, {.connectTimeout = kNever, .maxHalfOpen = 4});
  const size_t before = numOpenDescriptors();
  for (int i = 0; i < 200; ++i) {
    RawClient visitor(*two.line);
    visitor.resetWhenClosed();
  }
  for (int i = 0; i < 20; ++i) two.poll();
  EXPECT_EQ(numOpenDescriptors(), before);
  one.meet(two);
  two.meet(one);
  ASSERT_TRUE(areConnected(one, two));
}

TEST(Lifeline, AHostIsToldFromAProcess) {
  Side one(1), two(2);
  one.meet(two);
  two.meet(one);
  ASSERT_TRUE(areConnected(one, two));
  const auto silence = [&] {
    one.line->probe(process(2));
    return one.line->silenceOf(process(2));
  };
  // Number 2 does not run.
  ASSERT_TRUE(pollUntil({&one}, [&] { return silence().process > 2 * HostWatch::kPeriod; }));
  EXPECT_EQ(silence().host, 0);
  // It runs again.
  ASSERT_TRUE(pollUntil({&one, &two}, [&] { return silence().process == 0; }));
  EXPECT_TRUE(one.departures.empty());
}

// As when a firewall begins to drop what comes from the peer's host.
TEST(Lifeline, WhoWasGivenUpIsToldSo) {
  Side one(1), two(2);
  two.line->connect(one.line->address(), "one");
  RawClient client(*two.line);
  client.send(serialise(Hello{process(1), process(2)}));
  ASSERT_TRUE(pollUntil({&two}, [&] { return two.line->numConnected() == 1; }));
  client.send({&kGivenUp, 1});
  ASSERT_TRUE(pollUntil({&two}, [&] { return !two.departures.empty(); }));
  EXPECT_FALSE(two.departures[0].orderly);
  EXPECT_THAT(two.departures[0].cause, HasSubstr("it had no answer from the other host"));
}

// A rank is stopped, or gets no core, in the middle of its handshake.
TEST(Lifeline, WhoWasGivenUpForAStrangerCallsAgain) {
  const Lifeline::Options options{.handshakeTimeout = kSoon, .connectTimeout = kNever};
  Side one(1, options), two(2, options);
  const size_t before = numOpenDescriptors();
  one.meet(two);
  // Number 2 accepts the connection and, because no hello comes, drops it.
  size_t most = 0;
  ASSERT_TRUE(pollUntil({&two}, [&] {
    const size_t now = numOpenDescriptors();
    most = std::max(most, now);
    return most == before + 2 && now == before + 1;
  }));
  two.meet(one);
  ASSERT_TRUE(areConnected(one, two));
  EXPECT_TRUE(one.departures.empty() && two.departures.empty());
}

TEST(JobToken, LifelinesThatShareItConnect) {
  const Lifeline::Options options{.connectTimeout = kNever, .seal = Seal("secret")};
  Side one(1, options), two(2, options);
  one.meet(two);
  two.meet(one);
  EXPECT_TRUE(areConnected(one, two));
}

TEST(JobToken, LifelinesDropWhoHasAnotherOrNone) {
  const Lifeline::Options options{.connectTimeout = kNever, .seal = Seal("secret")};
  for (const char* token : {"", "guess"}) {
    Side two(2, options);
    const auto hello = signedHello(process(1), process(2), Seal(token));
    two.line->connect(Side(1).line->address(), "one");
    RawClient client(*two.line);
    client.send(serialise(hello));
    ASSERT_TRUE(pollUntil({&two}, [&] { return client.hasHungUp(); }));
    EXPECT_EQ(client.numReceived, 0U);
    EXPECT_EQ(two.line->numConnected(), 0U);
    // A hello to another process is refused, too, and one that number 2 itself has sent.
    for (const auto& other : {signedHello(process(1), process(3), Seal("secret")),
                              signedHello(process(2), process(1), Seal("secret"))}) {
      RawClient replaying(*two.line);
      replaying.send(serialise(Hello{process(1), process(2), other.signature}));
      ASSERT_TRUE(pollUntil({&two}, [&] { return replaying.hasHungUp(); }));
    }
    EXPECT_EQ(two.line->numConnected(), 0U);
  }
}

TEST(JobToken, APeerWithAnotherIsNoPeer) {
  Side one(1, {.connectTimeout = kNever, .seal = Seal("secret")});
  Side two(2, {.connectTimeout = kNever, .seal = Seal("guess")});
  one.meet(two);
  two.meet(one);
  ASSERT_TRUE(pollUntil({&one, &two}, [&] { return !one.departures.empty(); }));
  EXPECT_EQ(one.line->numConnected() + two.line->numConnected(), 0U);
}

TEST(Lifeline, DescriptorWakesASleeper) {
  Side one(1), two(2, {.connectTimeout = kSoon});
  const auto sleep = [](const Side& side) {
    pollfd fd{side.line->descriptor(), POLLIN, 0};
    return ::poll(&fd, 1, 20'000);
  };
  two.meet(one);  // `one` does not connect, so only the deadline can wake `two`
  while (two.departures.empty()) {
    ASSERT_EQ(sleep(two), 1);
    two.poll();
  }
  pollfd quiet{two.line->descriptor(), POLLIN, 0};
  EXPECT_EQ(::poll(&quiet, 1, 0), 0);

  Side three(3);
  one.meet(three);
  three.meet(one);
  ASSERT_TRUE(areConnected(one, three));
  three.line.reset();
  ASSERT_EQ(sleep(one), 1);
  one.poll();
  EXPECT_EQ(one.departures.size(), 1U);
}

TEST(Lifeline, MalformedAddressesAreRefusedByName) {
  Side one(1);
  const auto blob = Side(2).line->address();
  for (size_t size = 0; size <= blob.size() + 1; ++size) {
    if (size == blob.size()) continue;
    auto wrong = blob;
    wrong.resize(size);
    try {
      one.line->connect(wrong, "rank 7");
      FAIL() << "accepted " << size << " bytes";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("rank 7"));
    }
  }
}

// Connections without a hello have no id yet. A peer without an id would match any of them.
TEST(Lifeline, AnAddressWithoutAProcessIsRefused) {
  Side one(1);
  RawClient stranger(*one.line);
  one.poll();
  const auto nobody = LifelineAddress{parseNumericAddress("127.0.0.1"), ProcessId{}};
  try {
    one.line->connect(serialise(nobody), "rank 7");
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::Transport);
    EXPECT_THAT(error.what(), HasSubstr("rank 7"));
  }
}

// Forks a process with a lifeline that is connected to `side`, and runs `afterwards` there.
pid_t forkPeer(Side& side, int number, const std::function<void(Lifeline&)>& afterwards) {
  int channel[2];
  if (::pipe2(channel, O_CLOEXEC) != 0) return -1;
  const auto parentAddress = side.line->address();
  const pid_t child = ::fork();
  if (child == 0) {
    side.line->closeInChild();
    Side own(number);
    own.line->connect(parentAddress, "the parent");
    const auto address = own.line->address();
    if (::write(channel[1], address.data(), address.size()) < 0) ::_exit(1);
    pollUntil({&own}, [&] { return own.line->numConnected() == 1; });
    afterwards(*own.line);
    ::_exit(0);
  }
  std::vector<std::byte> address(side.line->address().size());
  EXPECT_EQ(::read(channel[0], address.data(), address.size()),
            static_cast<ssize_t>(address.size()));
  ::close(channel[0]);
  ::close(channel[1]);
  side.line->connect(address, "the child");
  EXPECT_TRUE(pollUntil({&side}, [&] { return side.line->numConnected() == 1; }));
  return child;
}

TEST(Lifeline, AKilledProcessIsSeen) {
  for (const int number : {1, 3}) {  // the child connects; the parent connects
    Side two(2);
    const pid_t child = forkPeer(two, number, [](Lifeline&) { ::pause(); });
    ASSERT_GT(child, 0);
    EXPECT_TRUE(two.departures.empty());
    ::kill(child, SIGKILL);
    EXPECT_TRUE(pollUntil({&two}, [&] { return !two.departures.empty(); }));
    ASSERT_EQ(two.departures.size(), 1U);
    EXPECT_FALSE(two.departures[0].orderly);
    EXPECT_EQ(two.departures[0].process, process(number));
    ::waitpid(child, nullptr, 0);
  }
}

TEST(Lifeline, AProcessThatLeavesInOrderIsSeenAsSuch) {
  Side two(2);
  const pid_t child = forkPeer(two, 3, [](Lifeline& line) { line.leave(); });
  EXPECT_TRUE(pollUntil({&two}, [&] { return !two.departures.empty(); }));
  EXPECT_TRUE(two.departures[0].orderly);
  ::waitpid(child, nullptr, 0);
}

TEST(Lifeline, ADeathIsSeenThoughAForkedWorkerLivesOn) {
  Side two(2);
  int hold[2];
  ASSERT_EQ(::pipe2(hold, O_CLOEXEC), 0);
  const pid_t child = forkPeer(two, 3, [&](Lifeline& line) {
    const pid_t worker = ::fork();
    if (worker == 0) {
      line.closeInChild();
      ::close(hold[1]);
      char byte = 0;
      (void)!::read(hold[0], &byte, 1);  // until the test closes its end
      ::_exit(0);
    }
    ::raise(SIGKILL);
  });
  EXPECT_TRUE(pollUntil({&two}, [&] { return !two.departures.empty(); }));
  EXPECT_FALSE(two.departures[0].orderly);
  ::waitpid(child, nullptr, 0);
  ::close(hold[0]);
  ::close(hold[1]);
}

}  // namespace
}  // namespace smddp::bootstrap
