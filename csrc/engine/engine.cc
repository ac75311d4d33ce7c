#include "engine/engine.h"

#include <algorithm>
#include <thread>

#include "common/interrupt.h"
#include "common/log.h"
#include "engine/store_meeting.h"

namespace smddp::engine {
namespace {

// shutdown() waits so long for operations in flight, and then for peers to take in the bytes that were sent.
constexpr Nanoseconds kShutdownWait = 2'000'000'000;

// An asynchronous submitter begins operations up to this size itself: that takes it no longer than to wake a progress
// thread takes (some 50 us). It would pay for a longer one with time in which it could compute.
constexpr int64_t kLongestBegun = 64 << 10;

// The next step of the thread that submits an operation.
enum class Next { Wait, Begin, Leave };

Next nextOf(const calls::Request& request) {
  if (request.willWait) return Next::Wait;
  const int64_t bytes =
      std::max(calls::totalBytes(request.input), calls::totalBytes(request.output));
  return bytes > kLongestBegun ? Next::Leave : Next::Begin;
}
// A message begins with an announcement or an answer.
Next nextOf(const calls::Message&) { return Next::Begin; }

bool runAtOnce(groups::Group& group, calls::Request& request,
               const calls::CompletionPtr& completion) {
  return group.operations.runOneShot(request, completion);
}
bool runAtOnce(groups::Group&, calls::Message&, const calls::CompletionPtr&) { return false; }

void submitTo(groups::Group& group, calls::Request request, calls::CompletionPtr completion) {
  group.operations.submit(std::move(request), std::move(completion));
}
void submitTo(groups::Group& group, calls::Message message, calls::CompletionPtr completion) {
  group.submit(std::move(message), std::move(completion));
}

// Counts calls if the settings ask for it.
process::Process::Options withMetrics(process::Process::Options options) {
  if (auto metrics = observe::MetricsWriter::metricsFor(options.settings))
    options.metrics = std::move(metrics);
  return options;
}

}  // namespace

Engine::Engine(const Options& options)
    : settings(options.process.settings),
      forkCount_(progress::countForks()),
      process_(std::make_unique<process::Process>(withMetrics(options.process), ownership_)),
      tensorMemory_(process_->memory().tensors),
      groups_(ownership_, *process_),
      progress_(ownership_, *process_, groups_, options.progressThread) {
  forkHold_.emplace(ownership_, progress_, *process_);
  if (!settings.metrics.empty()) metricsWriter_.emplace(process_->metrics(), settings);
}

Engine::~Engine() { shutdown(); }

void Engine::requireUsable() const {
  if (isShutDown_.load()) raise(ErrorKind::Usage, "smddp has been shut down");
  if (isUsable()) return;
  const std::string open = groups_.namesInChild();
  raise(ErrorKind::Usage,
        "smddp cannot be used in a process that was forked after init_process_group(){}; "
        "initialise in the child instead, or start it with spawn",
        open.empty() ? "" : fmt::format(": its parent had not destroyed {}", open));
}

std::shared_ptr<transport::shm::CommMemory> Engine::tensorMemory() const {
  requireUsable();
  auto memory = tensorMemory_.lock();
  if (!memory) raise(ErrorKind::Usage, "smddp has been shut down");
  return memory;
}

bool Engine::isReplaceableInChild() const {
  return !isShutDown_.load() && !isUsable() && groups_.namesInChild().empty();
}

void Engine::shutdown() {
  if (isShuttingDown_.exchange(true)) return;
  forkHold_.reset();
  if (!isUsable()) {
    // The child of a fork owns neither the threads nor the connections.
    progress_.forgetThreads();
    if (metricsWriter_) metricsWriter_->forget();
    isShutDown_.store(true);
    static_cast<void>(process_.release());
    return;
  }
  const auto waitAMoment = [this](const std::function<bool()>& isOver) {
    const Deadline deadline = Deadline::after(process_->clock(), kShutdownWait);
    bool over = false;
    while (!over && progress_.hasThreads() && !deadline.passed(process_->clock())) {
      try {
        progress_.call([&] { over = isOver(); });
      } catch (const Error& error) {
        SMDDP_LOG(Debug, "engine", "while smddp was shut down: {}", error.what());
        return;
      }
      if (!over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  };
  waitAMoment([this] { return !groups_.hasOpenExceptReceives(); });
  progress_.callAndRunContinuations([this] { groups_.leaveAll(); });
  // Peers may not have read the last bytes that we sent. Wait until they have read them, or have left.
  waitAMoment([this] { return groups_.areRemoteRanksDone(); });
  // Continuations may wait for what has just ended.
  progress_.runContinuations();
  progress_.stop();
  if (metricsWriter_) metricsWriter_->stop();
  // Only the owner may do this: until its connections are closed, the process still takes in messages of peers.
  progress_.call([this] {
    groups_.clear();
    isShutDown_.store(true);
    process_.reset();
  });
}

// --- groups -----------------------------------------------------------------------------------------------

groups::Place Engine::reserve(const groups::GroupSpec& spec) {
  requireUsable();
  std::optional<groups::Place> place;
  progress_.call([&] {
    if (groups_.hasLeftAll()) raise(ErrorKind::Usage, "smddp has been shut down");
    groups_.reap();
    if (!tuning_) {
      tuning_ = std::make_shared<const collectives::Tuning>(
          collectives::Tuning::read(settings.tuningFile));
    }
    place.emplace(*process_, tuning_, spec);
  });
  return *std::move(place);
}

std::shared_ptr<groups::Group> Engine::join(const groups::Place& place,
                                            const groups::Members& members) {
  std::shared_ptr<groups::Group> group;
  const auto cannotJoin = [&](ErrorKind kind, const char* why) {
    const Rank jobRank = bootstrap::jobRankOf(place.spec.jobRanks, place.spec.me);
    return Error(
        kind, fmt::format("rank {} cannot join group \"{}\": {}", jobRank, place.spec.name, why));
  };
  progress_.call([&] {
    try {
      group = std::make_shared<groups::Group>(*process_, place, members);
    } catch (const Error& error) {
      throw cannotJoin(error.kind(), error.what());
    } catch (const std::exception& error) {
      throw cannotJoin(ErrorKind::Resource, error.what());
    }
    groups_.add(group);
  });
  SMDDP_LOG(Info, "engine", "{}", group->describe());
  return group;
}

// The catch blocks are the one place that tells the others of an error.
std::shared_ptr<groups::Group> Engine::createGroup(const groups::GroupSpec& spec,
                                                   groups::Meeting& meeting) {
  std::optional<groups::Place> place;
  std::optional<groups::Members> members;
  std::optional<uint64_t> id;
  std::shared_ptr<groups::Group> group;
  const auto giveUp = [&](const Error& mine) {
    // Ranks that have joined listen to the meeting no longer: mates read this before their first call, and others get
    // it when they ask for this rank.
    if (members && !group) {
      progress_.call([&] {
        const calls::Break broken{1, mine};
        place->region->publishBreak(broken);
        if (id) groups_.refuse(*id, broken);
      });
    }
    const Error error = meeting.tell(mine);
    if (group) destroyGroup(group);
    return error;
  };
  try {
    place.emplace(reserve(spec));
    members.emplace(meeting.exchange(place->introduction));
    id = members->groupId();
    group = join(*place, *members);
    meeting.complete();
    return group;
  } catch (const Error& error) {
    throw giveUp(error);
  } catch (...) {
    const Rank jobRank = bootstrap::jobRankOf(spec.jobRanks, spec.me);
    giveUp(Error(ErrorKind::Aborted, fmt::format("{} was interrupted by a signal",
                                                 bootstrap::describeThisProcess(jobRank))));
    throw;
  }
}

std::shared_ptr<groups::Group> Engine::createGroup(bootstrap::Store& store,
                                                   const groups::GroupSpec& spec,
                                                   Nanoseconds timeout, const KnownMembers& known) {
  StoreMeeting meeting(*this, store, spec, timeout, known);
  return createGroup(spec, meeting);
}

void Engine::waitForOpenCalls(groups::Group& group,
                              const std::vector<calls::CompletionPtr>& others) {
  if (!isUsable()) return;
  for (const auto& completion : others) wait(group, *completion);
  std::vector<calls::CompletionPtr> open;
  progress_.call([&] { open = group.openExceptReceives(); });
  for (const auto& completion : open) wait(group, *completion);
}

void Engine::destroyGroup(const std::shared_ptr<groups::Group>& group, const char* how) {
  if (!isUsable()) return;
  progress_.callAndRunContinuations([&] { groups_.leave(group, how); });
  progress_.call([&] { groups_.reap(); });
  if (metricsWriter_) metricsWriter_->writeSoon();
}

// --- operations -------------------------------------------------------------------------------------------

template <typename Operation>
calls::CompletionPtr Engine::submitAny(groups::Group& group, Operation operation) {
  requireUsable();
  auto completion = std::make_shared<calls::Completion>();
  const bool willWait = nextOf(operation) == Next::Wait;
  const bool leavesIt = nextOf(operation) == Next::Leave;
  if (willWait) progress_.callerCameBack();
  const bool ran = progress_.tryRun([&] {
    const bool isBegun = willWait && groups_.idle() && runAtOnce(group, operation, completion);
    // Nothing is in flight, and nothing is left behind.
    if (isBegun && completion->done() && !completion->error()) return;
    if (!isBegun) submitTo(group, std::move(operation), completion);
    groups_.activate(group);
    if (leavesIt || (isBegun && completion->done())) {
      progress_.collectLeftovers();
    } else if (willWait) {
      progress_.runUntil([&] { return completion->done(); }, progress::Progress::Waiter::Caller);
    } else {
      progress_.advanceOnce();
    }
  });
  if (!ran) post(group, std::move(operation), completion);
  if (willWait) wait(group, *completion);
  return completion;
}

template <typename Operation>
void Engine::post(groups::Group& group, Operation operation, calls::CompletionPtr completion) {
  // A std::function can hold only copyable values; the shared pointer avoids copying the operation.
  const auto shared = std::make_shared<Operation>(std::move(operation));
  progress_.post([this, &group, shared, completion = std::move(completion)] {
    submitTo(group, std::move(*shared), completion);
    groups_.activate(group);
  });
}

calls::CompletionPtr Engine::submit(groups::Group& group, calls::Request request) {
  return submitAny(group, std::move(request));
}

calls::CompletionPtr Engine::submit(groups::Group& group, calls::Message message) {
  return submitAny(group, std::move(message));
}

void Engine::run(groups::Group& group, calls::Request request) {
  request.willWait = true;
  const calls::CompletionPtr completion = submit(group, std::move(request));
  wait(group, *completion);
  if (completion->error()) throw Error(*completion->error());
}

void Engine::enqueue(groups::Group& group, calls::Request request,
                     calls::CompletionPtr completion) {
  requireUsable();
  post(group, std::move(request), std::move(completion));
}

void Engine::enqueue(groups::Group& group, calls::Message message,
                     calls::CompletionPtr completion) {
  requireUsable();
  post(group, std::move(message), std::move(completion));
}

void Engine::waitUntil(groups::Group& group, const std::function<bool()>& done,
                       Nanoseconds yieldFor) {
  requireUsable();
  try {
    progress_.waitUntil(done, yieldFor);
  } catch (...) {
    // From here on this rank may make other calls than the ranks that wait for it.
    callOn(group, [&] { group.interrupt(); });
    throw;
  }
}

void Engine::wait(groups::Group& group, const calls::Completion& completion) {
  progress_.callerCameBack();
  if (!completion.done()) waitUntil(group, [&] { return completion.done(); });
  // If all ranks got a signal, it is the cause, even if another rank was the first to break the group.
  if (completion.error()) checkInterrupt();
}

bool Engine::waitFor(groups::Group& group, const calls::Completion& completion,
                     Nanoseconds timeout) {
  requireUsable();
  const Deadline deadline = Deadline::after(process_->clock(), timeout);
  waitUntil(group, [&] { return completion.done() || deadline.passed(process_->clock()); });
  return completion.done();
}

void Engine::waitForAny(groups::Group& group, const std::vector<calls::CompletionPtr>& completions,
                        const std::atomic<bool>& interrupted, Nanoseconds yieldFor) {
  const auto done = [&] {
    return interrupted.load(std::memory_order_acquire) ||
           std::any_of(completions.begin(), completions.end(),
                       [](const auto& completion) { return completion->done(); });
  };
  waitUntil(group, done, yieldFor);
}

std::vector<calls::CompletionPtr> Engine::withdraw(groups::Group& group,
                                                   std::vector<calls::CompletionPtr> receives) {
  requireUsable();
  progress_.callAndRunContinuations([&] {
    std::erase_if(receives, [&](const auto& receive) { return group.messages.withdraw(*receive); });
  });
  return receives;
}

void Engine::keep(groups::Group& group, std::shared_ptr<void> memory) {
  if (!isUsable()) return;
  progress_.call([&] { group.ended.keep(std::move(memory)); });
}

// --- failure ----------------------------------------------------------------------------------------------

void Engine::callOn(groups::Group& group, const std::function<void()>& action) {
  if (!isUsable()) return;
  progress_.callAndRunContinuations([&] {
    action();
    groups_.activate(group);
  });
}

void Engine::expire(groups::Group& group, const calls::Completion& completion, Nanoseconds waited) {
  callOn(group, [&] { group.sentinel.expire(completion, waited); });
}

void Engine::fail(groups::Group& group, const Error& error) {
  callOn(group, [&] { group.sentinel.fail(error); });
}

void Engine::onBreak(groups::Group& group, std::function<void(const Error&)> action) {
  requireUsable();
  auto report = [this, action = std::move(action)](const Error& error) {
    progress_.runBlocking([action, error] { action(error); });
  };
  callOn(group, [&] { group.sentinel.onBreak(std::move(report)); });
}

void Engine::watchMembers(groups::Group& group) {
  requireUsable();
  callOn(group, [&] {
    groups_.checkIdleGroups();
    group.sentinel.watchMembers();
  });
}

std::optional<Error> Engine::failureOf(const groups::Group& group) {
  std::optional<Error> error;
  progress_.call([&] { error = group.breakAsUserError(); });
  return error;
}

}  // namespace smddp::engine
