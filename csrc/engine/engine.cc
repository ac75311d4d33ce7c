#include "engine/engine.h"

#include <poll.h>

#include <algorithm>
#include <span>
#include <thread>
#include <type_traits>

#include "bootstrap/locality.h"
#include "bootstrap/rendezvous.h"
#include "common/config.h"
#include "common/interrupt.h"
#include "common/log.h"
#include "engine/process/capabilities.h"

namespace smddp::engine {
namespace {

// How long shutdown() waits for what is in flight, and then for peers to take in what was sent.
constexpr Nanoseconds kShutdownWait = 2'000'000'000;

// An asynchronous submitter begins operations up to this size itself: that takes it no longer than to wake a progress
// thread takes (some 50 us). It would pay for a longer one with time in which it could compute.
constexpr int64_t kLongestBegun = 64 << 10;

int64_t sizeOf(const calls::Request& request) {
  return std::max(calls::totalBytes(request.input), calls::totalBytes(request.output));
}
// A message begins with an announcement or an answer.
int64_t sizeOf(const calls::Message&) { return 0; }

// Counts calls if the settings ask for it.
process::Process::Options withMetrics(process::Process::Options options) {
  if (auto metrics = observe::MetricsWriter::metricsFromSettings())
    options.metrics = std::move(metrics);
  return options;
}

// Waits until this process has a lifeline to every remote peer. All ranks of a new group wait here: a rank that went on
// to compute would not answer the handshake and would look dead. A rank that fails now is reported by the first
// operation. But if there is no connection between two ranks, both raise here: the one that has tried knows at once, and
// tells the other, which would wait for it, through the store. So does a rank whose time is over.
void awaitLifelines(Engine& engine, bootstrap::Rendezvous& meeting, Rank me,
                    const std::vector<bootstrap::Introduction>& introductions,
                    Nanoseconds timeout) {
  process::Process& process = engine.process();
  const Deadline deadline = Deadline::after(process.clock(), timeout);
  // Usually all is settled before. The store's process serves all ranks.
  constexpr Nanoseconds kNotesPeriod = 250'000'000;
  Deadline nextNotes = Deadline::after(process.clock(), kNotesPeriod);
  // Sleeps until there is something to do. Where there are more ranks than cores, a rank that polls takes time that
  // another one needs for its answer. Another thread may take in the event first, so the sleep is short.
  constexpr int kSleepMilliseconds = 20;
  pollfd events{.fd = -1, .events = POLLIN, .revents = 0};
  const auto giveUp = [&](const Error& error) {
    meeting.tell(error);
    throw error;
  };
  for (;;) {
    std::vector<Rank> missing;
    std::optional<process::Process::Unreached> unreached;
    engine.call([&] {
      process.checkPeers();
      missing = process.unconnectedAmong(introductions);
      unreached = process.unreachedAmong(introductions);
      events.fd = process.lifelineDescriptor();
    });
    if (unreached) {
      const std::string other = process::Peer::describe(introductions[unreached->rank]);
      giveUp(Error(ErrorKind::PeerLost,
                   fmt::format("rank {} has no connection to rank {} ({}): {}; if that process "
                               "runs, name the network between the hosts in SMDDP_INTERFACE",
                               introductions[me].jobRank, introductions[unreached->rank].jobRank,
                               other, unreached->cause)));
    }
    // A rank that has given this one up is not in the group.
    if (missing.empty()) return meeting.checkNotes();
    if (deadline.passed(process.clock())) {
      const Rank first = missing.front();
      std::vector<Rank> others;
      for (const Rank rank : std::span(missing).subspan(1)) {
        others.push_back(introductions[rank].jobRank);
      }
      giveUp(
          Error(ErrorKind::Timeout,
                fmt::format("rank {} waited {:.1f} s for a connection to {}{}: stopped, busy, or "
                            "behind a firewall; look at their logs, or raise the timeout",
                            introductions[me].jobRank, static_cast<double>(timeout) * 1e-9,
                            bootstrap::describe(introductions[first]),
                            others.empty() ? "" : " and " + bootstrap::listRanks(others))));
    }
    checkInterrupt();
    if (nextNotes.passed(process.clock())) {
      meeting.checkNotes();
      nextNotes = Deadline::after(process.clock(), kNotesPeriod);
    }
    ::poll(&events, 1, kSleepMilliseconds);
  }
}

}  // namespace

Engine::Engine(const Options& options)
    : forkCount_(progress::countForks()),
      process_(std::make_unique<process::Process>(withMetrics(options.process), ownership_)),
      tensorMemory_(process_->memory().tensors),
      groups_(ownership_, *process_),
      progress_(ownership_, *process_, groups_, options.progressThread) {
  forkHold_.emplace(ownership_, progress_, *process_);
  if (!settings().metrics.empty()) metricsWriter_.emplace(process_->metrics());
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
        call([&] { over = isOver(); });
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
  // As the owner: until its connections are closed, the process still takes in what peers send.
  call([this] {
    groups_.clear();
    isShutDown_.store(true);
    process_.reset();
  });
}

// --- groups -----------------------------------------------------------------------------------------------

std::pair<std::shared_ptr<groups::Group>, bootstrap::Introduction> Engine::beginGroup(
    const groups::Group::Spec& spec) {
  requireUsable();
  std::shared_ptr<groups::Group> group;
  bootstrap::Introduction mine;
  call([&] {
    if (groups_.hasLeftAll()) raise(ErrorKind::Usage, "smddp has been shut down");
    groups_.reap();
    group = std::make_shared<groups::Group>(*process_, spec);
    mine = process_->introduce(group->makeEntry());
  });
  return {group, mine};
}

void Engine::finishGroup(const std::shared_ptr<groups::Group>& group,
                         const std::vector<bootstrap::Introduction>& introductions,
                         const std::vector<std::string>& nodeOfRank) {
  call([&] {
    group->join(introductions, nodeOfRank);
    groups_.add(group);
  });
  SMDDP_LOG(Info, "engine", "{}", group->describe());
}

std::vector<bootstrap::Rendezvous::Loss> Engine::lostOf(const KnownMembers& known) {
  std::vector<bootstrap::Rendezvous::Loss> lost;
  if (!known.parent) return lost;
  call([&] {
    process_->checkPeers();
    for (size_t rank = 0; rank < known.ranks.size(); ++rank) {
      if (auto error = known.parent->howLost(known.ranks[rank])) {
        // Ranks that died come first: others may have left because of them.
        const bool died = known.parent->hasDied(known.ranks[rank]);
        lost.insert(died ? lost.begin() : lost.end(),
                    {static_cast<Rank>(rank), *std::move(error), died});
      }
    }
  });
  return lost;
}

std::shared_ptr<groups::Group> Engine::createGroup(bootstrap::Store& store,
                                                   const groups::Group::Spec& spec,
                                                   Nanoseconds timeout, const KnownMembers& known) {
  try {
    return meet(store, spec, timeout, known);
  } catch (const Error& error) {
    // Ranks of other groups may be about to wait for this one.
    if (isUsable() && error.kind() == ErrorKind::PeerLost) {
      call([&] {
        process_->noteFailure(error.what());
        groups_.tellOfTrouble();
      });
    }
    throw;
  }
}

std::shared_ptr<groups::Group> Engine::meet(bootstrap::Store& store,
                                            const groups::Group::Spec& spec, Nanoseconds timeout,
                                            const KnownMembers& known) {
  const Seal seal(settings().jobToken.text);
  std::pair<std::shared_ptr<groups::Group>, bootstrap::Introduction> begun;
  try {
    begun = beginGroup(spec);
  } catch (const Error& error) {
    const Rank jobRank = bootstrap::jobRankOf(spec.jobRanks, spec.me);
    bootstrap::reportTrouble(store, spec.name, spec.me, jobRank, seal, error);
    throw;
  }
  const std::shared_ptr<groups::Group>& group = begun.first;
  bootstrap::Introduction& mine = begun.second;
  const auto watch = [&] {
    checkInterrupt();
    return lostOf(known);
  };
  bootstrap::Rendezvous rendezvous(store, spec.name, spec.me, spec.size, timeout, seal, watch,
                                   spec.jobRanks);
  auto introductions = rendezvous.exchange(mine);
  const auto probe = [this](const bootstrap::Introduction& other, std::string* why) {
    return process_->tryMap(other, why);
  };
  const bootstrap::Locality locality = rendezvous.agreeOnNodes(introductions, probe);
  const auto& names = locality.nodeOfRank;
  const auto remote = static_cast<size_t>(std::count_if(
      names.begin(), names.end(), [&](const auto& name) { return name != names[spec.me]; }));
  std::optional<bootstrap::Rendezvous> second;
  if (remote > 0) {
    // Endpoints are made only now: on a single node the network is never touched.
    std::optional<Error> trouble;
    try {
      // Other groups go on while the resolver waits for an answer.
      const std::string host = process::addressForPeers();
      call([&] { process_->openFabric(remote, host); });
    } catch (const Error& error) {
      trouble = error;
    }
    call([&] {
      mine = process_->introduce(mine.group);
      if (!trouble) return;
      mine.trouble = trouble->what();
      mine.troubleKind = trouble->kind();
    });
    second.emplace(store, spec.name + ".fabric", spec.me, spec.size, timeout, seal, watch,
                   spec.jobRanks);
    second->follow(rendezvous);
    introductions = second->exchange(mine);
  }
  call([&] { process_->setNodeAgreement(locality.agreement); });
  try {
    finishGroup(group, introductions, names);
  } catch (const Error& error) {
    // Ranks of other nodes look for notes in awaitLifelines(); mates have heard of it (Group::join).
    if (second) second->tell(error);
    throw;
  }
  if (!second) return group;
  try {
    awaitLifelines(*this, *second, spec.me, introductions, timeout);
  } catch (const Error&) {
    destroyGroup(group);
    throw;
  } catch (...) {
    second->tell(
        Error(ErrorKind::Aborted, fmt::format("{} was interrupted by a signal",
                                              bootstrap::describe(introductions[spec.me]))));
    destroyGroup(group);
    throw;
  }
  return group;
}

void Engine::waitForOpenCalls(groups::Group& group,
                              const std::vector<calls::CompletionPtr>& others) {
  if (!isUsable()) return;
  for (const auto& completion : others) wait(group, *completion);
  std::vector<calls::CompletionPtr> open;
  call([&] { open = group.openExceptReceives(); });
  for (const auto& completion : open) wait(group, *completion);
}

void Engine::destroyGroup(const std::shared_ptr<groups::Group>& group) {
  if (!isUsable()) return;
  progress_.callAndRunContinuations([&] { groups_.leave(group); });
  call([&] { groups_.reap(); });
  if (metricsWriter_) metricsWriter_->writeSoon();
}

// --- operations -------------------------------------------------------------------------------------------

template <typename Operation>
calls::CompletionPtr Engine::submitAny(groups::Group& group, Operation operation) {
  requireUsable();
  auto completion = std::make_shared<calls::Completion>();
  bool willWait = false;
  if constexpr (std::is_same_v<Operation, calls::Request>) willWait = operation.willWait;
  const bool isLong = !willWait && sizeOf(operation) > kLongestBegun;
  if (willWait) progress_.callerCameBack();
  const bool ran = progress_.tryRun([&] {
    bool isOneShot = false;
    if constexpr (std::is_same_v<Operation, calls::Request>) {
      isOneShot = willWait && groups_.idle() && group.runOneShot(operation, completion);
    }
    if (isOneShot) {
      // Else the other ranks were late, and the operation is in flight.
      if (completion->done()) {
        // An error has left continuations.
        if (completion->error()) {
          groups_.activate(group);
          progress_.collectLeftovers();
        }
        return;
      }
    } else {
      group.submit(std::move(operation), completion);
    }
    groups_.activate(group);
    if (willWait) {
      progress_.runUntil([&] { return completion->done(); }, progress::Progress::Waiter::Caller);
    } else if (isLong) {
      progress_.collectLeftovers();
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
  // What a std::function holds must be copyable; the shared pointer avoids copying the operation.
  const auto shared = std::make_shared<Operation>(std::move(operation));
  progress_.post([this, &group, shared, completion = std::move(completion)] {
    group.submit(std::move(*shared), completion);
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
    std::erase_if(receives, [&](const auto& receive) { return group.withdraw(*receive); });
  });
  return receives;
}

void Engine::wakeWaiters() { progress_.wakeWaiters(); }

void Engine::keep(groups::Group& group, std::shared_ptr<void> memory) {
  if (!isUsable()) return;
  call([&] { group.keep(std::move(memory)); });
}

void Engine::finish(calls::Completion& completion, std::optional<Error> error) {
  for (const auto& action : completion.finish(std::move(error))) action();
  wakeWaiters();
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
  callOn(group, [&] { group.expire(completion, waited); });
}

void Engine::abort(groups::Group& group, const std::string& reason) {
  fail(group, Error(ErrorKind::Aborted, reason));
}

void Engine::fail(groups::Group& group, const Error& error) {
  callOn(group, [&] { group.fail(error); });
}

void Engine::onBreak(groups::Group& group, std::function<void(const Error&)> action) {
  requireUsable();
  auto report = [this, action = std::move(action)](const Error& error) {
    progress_.runBlocking([action, error] { action(error); });
  };
  callOn(group, [&] { group.onBreak(std::move(report)); });
}

void Engine::runCallback(std::function<void()> action) { progress_.runBlocking(std::move(action)); }

void Engine::watchMembers(groups::Group& group) {
  requireUsable();
  callOn(group, [&] {
    groups_.checkIdleGroups();
    group.watchMembers();
  });
}

std::optional<Error> Engine::failureOf(const groups::Group& group) {
  std::optional<Error> error;
  call([&] { error = group.breakAsUserError(); });
  return error;
}

}  // namespace smddp::engine
