// The order in which calls on a device begin, and how they end if they cannot begin.
#include "engine/progress/deferred_calls.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <string>
#include <vector>

namespace smddp::engine::progress {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Records what happens to calls, in order, and waits for it.
class Events {
 public:
  void add(const std::string& what) {
    const std::lock_guard lock(mutex_);
    events_.push_back(what);
    changed_.notify_all();
  }
  std::vector<std::string> await(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(30), [&] { return events_.size() >= count; });
    return events_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> events_;
};

// Stands for a device's event; the test sets it.
using Flag = std::shared_ptr<std::atomic<bool>>;
Flag flag(bool set = false) { return std::make_shared<std::atomic<bool>>(set); }

DeferredCalls::Call call(Events& events, const std::string& name, const Flag& ready,
                         Deadline deadline = Deadline::never()) {
  return {[ready] { return ready->load(); }, [&events, name] { events.add(name); },
          [&events, name](const Error& error) {
            events.add(fmt::format("{}: {}", name, toString(error.kind())));
          },
          deadline};
}

TEST(DeferredCalls, BeginInTheOrderMadeWhicheverIsReadyFirst) {
  Events events;
  DeferredCalls line;
  EXPECT_FALSE(line.busy());
  const Flag first = flag();
  line.add(call(events, "first", first));
  line.add(call(events, "second", flag(true)));
  EXPECT_TRUE(line.busy());
  EXPECT_THAT(events.await(0), ElementsAre());
  first->store(true);
  EXPECT_THAT(events.await(2), ElementsAre("first", "second"));
}

// If nothing is busy, a call may skip the queue, because all earlier calls have begun.
TEST(DeferredCalls, AreBusyUntilTheLastHasBegun) {
  DeferredCalls line;
  std::promise<void> begins;
  std::promise<void> mayGoOn;
  std::promise<void> ended;
  line.add({[] { return true; },
            [&] {
              begins.set_value();
              mayGoOn.get_future().wait();
            },
            [](const Error&) {}, Deadline::never()});
  line.add({[] { return true; }, [&] { ended.set_value(); }, [](const Error&) {}, {}});
  begins.get_future().wait();
  EXPECT_TRUE(line.busy());
  mayGoOn.set_value();
  ended.get_future().wait();
  line.drain();
  EXPECT_FALSE(line.busy());
}

TEST(DeferredCalls, EndWithWhatTheDeviceThrewAndTheNextGoOn) {
  Events events;
  DeferredCalls line;
  std::promise<std::string> text;
  line.add({[]() -> bool { throw std::runtime_error("an illegal address"); },
            [&] { events.add("never"); },
            [&](const Error& error) {
              EXPECT_EQ(error.kind(), ErrorKind::Transport);
              text.set_value(error.what());
            },
            Deadline::never()});
  line.add({[] { return true; }, [] { raise(ErrorKind::PeerLost, "rank 1 died"); },
            [&](const Error& error) { events.add(error.what()); }, Deadline::never()});
  line.add(call(events, "next", flag(true)));
  EXPECT_THAT(text.get_future().get(), HasSubstr("an illegal address"));
  EXPECT_THAT(events.await(2), ElementsAre("rank 1 died", "next"));
}

TEST(DeferredCalls, EndWithTheirTimeOut) {
  Events events;
  DeferredCalls line;
  const MonotonicClock clock;
  line.add(call(events, "late", flag(), Deadline::after(clock, 1'000'000)));
  EXPECT_THAT(events.await(1), ElementsAre("late: CollectiveTimeoutError"));
}

TEST(DeferredCalls, EndWhenTheLineIsClosed) {
  Events events;
  DeferredCalls line;
  line.add(call(events, "first", flag()));
  line.add(call(events, "second", flag(true)));
  line.close(Error(ErrorKind::Aborted, "the end"));
  EXPECT_FALSE(line.busy());
  line.add(call(events, "third", flag(true)));
  line.close(Error(ErrorKind::Internal, "of no effect"));
  EXPECT_THAT(events.await(3),
              ElementsAre("first: AbortedError", "second: AbortedError", "third: AbortedError"));
}

// The continuation of a call that ended may destroy the group, on the queue's own thread.
TEST(DeferredCalls, MayBeDestroyedByWhatTheyEnd) {
  auto line = std::make_unique<DeferredCalls>();
  Events events;
  std::promise<void> made;
  line->add({[&]() -> bool {
               made.get_future().wait();
               throw std::runtime_error("a broken device");
             },
             [] {},
             [&](const Error&) {
               line.reset();
               events.add("destroyed");
             },
             Deadline::never()});
  line->add(call(events, "waiting", flag()));
  made.set_value();
  EXPECT_THAT(events.await(2), ElementsAre("waiting: AbortedError", "destroyed"));
}

}  // namespace
}  // namespace smddp::engine::progress
