#include "engine/engine.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/forks.h"

namespace smddp::engine {
namespace {

// What a peer that is still computing may delay our exit by.
constexpr Nanoseconds kFarewell = 2'000'000'000;
// Control messages kept for groups that this rank has yet to make.
constexpr size_t kMaxStashed = 1024;

}  // namespace

Engine::Engine(Options options)
    : forkGeneration_(watchForks()),
      hasThreads_(options.progressThread),
      process_(std::make_unique<Process>(options.process)),
      policy_(*process_) {
  process_->onControl([this](Peer& from, transport::Bytes message) { dispatch(from, message); });
  if (options.progressThread) {
    const std::lock_guard lock(threadMutex_);
    threads_.emplace_back([this] { progressLoop(/*first=*/true); });
  }
  enroll(this);
}

Engine::~Engine() { shutdown(); }

void Engine::requireUsable() const {
  if (!process_) raise(ErrorKind::Usage, "smddp has been shut down");
  if (forkGeneration_ != forkGeneration()) {
    raise(ErrorKind::Usage,
          "smddp cannot be used in a process that was forked after init_process_group(); "
          "initialise in the child instead, or start it with spawn");
  }
}

void Engine::shutdown() {
  if (forkGeneration_ != forkGeneration()) {
    // The child of a fork owns neither the thread nor the connections.
    for (auto& thread : threads_) thread.detach();
    static_cast<void>(process_.release());
    return;
  }
  if (!process_) return;
  strike(this);
  call([this] {
    shutDown_ = true;
    for (auto& [id, group] : groups_) {
      group->leave();
      remains_.push_back(group);
    }
    groups_.clear();
    active_.clear();
    collectContinuations();
  });
  // Peers may not have read the last bytes we sent; they have when they left, too.
  const Deadline deadline = Deadline::after(process_->clock(), kFarewell);
  const auto settled = [this] {
    process_->poll();
    process_->checkPeers();
    return std::all_of(remains_.begin(), remains_.end(), [](const auto& group) {
      return !group->spansNodes() || group->abandoned();
    });
  };
  bool done = false;
  while (!done && hasThreads_ && !deadline.passed(process_->clock())) {
    call([&] { done = settled(); });
    if (!done) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  // Callbacks may wait for what has just ended.
  runContinuations();
  std::vector<std::thread> threads;
  {
    const std::lock_guard lock(threadMutex_);
    stop_ = true;
    threads.swap(threads_);
  }
  threadChanged_.notify_all();
  process_->doorbell().ringSelf();
  for (auto& thread : threads) thread.join();
  remains_.clear();
  stash_.clear();
  process_.reset();
}

// --- groups -----------------------------------------------------------------------------------------------

std::pair<std::shared_ptr<Group>, bootstrap::Introduction> Engine::beginGroup(
    const Group::Spec& spec) {
  requireUsable();
  auto group = std::make_shared<Group>(*process_, spec);
  bootstrap::Introduction mine;
  call([&] {
    if (shutDown_) raise(ErrorKind::Usage, "smddp has been shut down");
    reap();
    mine = process_->introduce(group->publish());
    mine.nodeAgreement = nodeAgreement_;
  });
  return {group, mine};
}

void Engine::finishGroup(const std::shared_ptr<Group>& group,
                         const std::vector<bootstrap::Introduction>& introductions,
                         const std::vector<std::string>& nodeOfRank) {
  call([&] {
    group->join(introductions, nodeOfRank);
    groups_[group->id()] = group;
    if (const auto kept = stash_.extract(group->id()); !kept.empty()) {
      for (const Stashed& message : kept.mapped()) group->onControl(*message.from, message.message);
    }
  });
  SMDDP_LOG(Info, "engine", "{}", group->describe());
}

std::shared_ptr<Group> Engine::createGroup(bootstrap::Store& store, const Group::Spec& spec,
                                           Nanoseconds timeout) {
  auto [group, mine] = beginGroup(spec);
  const bootstrap::Seal seal(settings().jobToken.text);
  bootstrap::Rendezvous rendezvous(store, spec.name, spec.me, spec.size, timeout, seal);
  auto introductions = rendezvous.exchange(mine);
  const auto probe = [this](const bootstrap::Introduction& other, std::string* why) {
    return process_->probe(other, why);
  };
  const bootstrap::Locality locality = rendezvous.agreeOnNodes(introductions, probe);
  const auto& names = locality.nodeOfRank;
  const bool severalNodes =
      std::any_of(names.begin(), names.end(), [&](const auto& name) { return name != names[0]; });
  if (severalNodes) {
    // Endpoints are made only now: on a single node the network is never touched.
    const auto remote = static_cast<size_t>(std::count_if(
        names.begin(), names.end(), [&](const auto& name) { return name != names[spec.me]; }));
    call([&] {
      std::optional<Error> trouble;
      try {
        process_->openFabric(remote);
      } catch (const Error& error) {
        trouble = error;
      }
      mine = process_->introduce(mine.group);
      mine.nodeAgreement = nodeAgreement_;
      if (!trouble) return;
      mine.trouble = trouble->what();
      mine.troubleKind = trouble->kind();
    });
    bootstrap::Rendezvous second(store, spec.name + ".fabric", spec.me, spec.size, timeout, seal);
    introductions = second.exchange(mine);
  }
  call([&] { nodeAgreement_ = locality.agreement; });
  finishGroup(group, introductions, names);
  if (severalNodes) awaitLifelines(timeout);
  return group;
}

// While everybody is here: a rank that goes on to compute looks after no handshake, and would be
// taken for dead by those who wait for it. Who fails now is reported by the first operation.
void Engine::awaitLifelines(Nanoseconds timeout) {
  const Deadline deadline = Deadline::after(process_->clock(), timeout);
  bool settled = false;
  while (!settled && !deadline.passed(process_->clock())) {
    call([&] {
      process_->checkPeers();
      settled = process_->lifelinesSettled();
    });
    if (!settled) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

void Engine::destroyGroup(const std::shared_ptr<Group>& group) {
  if (!process_ || forkGeneration_ != forkGeneration()) return;
  call([&] {
    const auto found = groups_.find(group->id());
    if (found == groups_.end() || found->second != group) return;
    group->leave();
    remains_.push_back(group);
    groups_.erase(found);
    collectContinuations();
    reap();
  });
  runContinuations();
}

// Gives back the memory of groups that nobody can touch any more.
void Engine::reap() {
  if (remains_.empty()) return;
  process_->poll();
  process_->checkPeers();
  std::erase_if(remains_, [this](const auto& group) {
    if (!group->idle() || !group->abandoned()) return false;
    std::erase(active_, group.get());
    return true;
  });
}

void Engine::dispatch(Peer& from, transport::Bytes message) {
  // Every control message of the engine has its group behind the header.
  uint64_t id = 0;
  if (message.size() < sizeof(transport::ControlHeader) + sizeof id) return;
  std::memcpy(&id, message.data() + sizeof(transport::ControlHeader), sizeof id);
  if (const auto found = groups_.find(id); found != groups_.end()) {
    found->second->onControl(from, message);
    activate(*found->second);
    return;
  }
  for (const auto& group : remains_) {
    if (group->id() == id) return group->onControl(from, message);
  }
  if (stash_.size() >= kMaxStashed) return;
  auto& waiting = stash_[id];
  if (waiting.size() < kMaxStashed) waiting.push_back({&from, {message.begin(), message.end()}});
}

void Engine::failActive(const std::string& text, ErrorKind kind) {
  for (Group* group : active_) group->fail(Error(kind, text));
  collectContinuations();
}

// --- operations -------------------------------------------------------------------------------------------

template <typename Operation>
CompletionPtr Engine::submitAny(Group& group, Operation operation) {
  requireUsable();
  auto completion = std::make_shared<Completion>();
  const bool willWait = operation.willWait;
  if (willWait) policy_.returned();
  if (tryOwn()) {
    guarded([&] {
      drainInbox();
      if (willWait && active_.empty() && group.runAtOnce(operation, completion)) {
        if (completion->done()) return;
      } else {
        group.submit(std::move(operation), completion);
      }
      activate(group);
      if (willWait) {
        runOwned([&] { return completion->done(); }, Waiter::Caller);
      } else if (!turn()) {
        // What ended as it was submitted leaves nothing to wake the progress thread for.
        collectContinuations();
      }
    });
    release();
    runContinuations();
  } else {
    postOperation(group, std::move(operation), completion);
  }
  if (willWait) wait(*completion);
  return completion;
}

template <typename Operation>
void Engine::postOperation(Group& group, Operation operation, CompletionPtr completion) {
  // A function can be copied, an operation need not be.
  const auto shared = std::make_shared<Operation>(std::move(operation));
  post([this, &group, shared, completion = std::move(completion)] {
    group.submit(std::move(*shared), completion);
    activate(group);
  });
}

CompletionPtr Engine::submit(Group& group, Request request) {
  return submitAny(group, std::move(request));
}

CompletionPtr Engine::submit(Group& group, Message message) {
  return submitAny(group, std::move(message));
}

void Engine::enqueue(Group& group, Request request, CompletionPtr completion) {
  requireUsable();
  postOperation(group, std::move(request), std::move(completion));
}

void Engine::enqueue(Group& group, Message message, CompletionPtr completion) {
  requireUsable();
  postOperation(group, std::move(message), std::move(completion));
}

void Engine::wait(const Completion& completion) {
  policy_.returned();
  if (completion.done()) return;
  requireUsable();
  waitUntil([&] { return completion.done(); });
}

bool Engine::waitFor(const Completion& completion, Nanoseconds timeout) {
  requireUsable();
  const Deadline deadline = Deadline::after(process_->clock(), timeout);
  waitUntil([&] { return completion.done() || deadline.passed(process_->clock()); });
  return completion.done();
}

void Engine::waitForAny(const std::vector<CompletionPtr>& completions,
                        const std::atomic<bool>& enough, Nanoseconds yieldFor) {
  requireUsable();
  const auto done = [&] {
    return enough.load(std::memory_order_acquire) ||
           std::any_of(completions.begin(), completions.end(),
                       [](const auto& completion) { return completion->done(); });
  };
  waitUntil(done, yieldFor);
}

std::vector<CompletionPtr> Engine::withdraw(Group& group, std::vector<CompletionPtr> receives) {
  requireUsable();
  call([&] {
    std::erase_if(receives, [&](const auto& receive) { return group.withdraw(*receive); });
    collectContinuations();
  });
  runContinuations();
  return receives;
}

void Engine::wakeWaiters() {
  // Who waits sleeps as owner or beside it.
  if (process_) process_->doorbell().ringSelf();
  const std::lock_guard lock(waitMutex_);
  waitChanged_.notify_all();
}

void Engine::expire(Group& group, const Completion& completion, Nanoseconds waited) {
  breakOff(group, [&] { group.expire(completion, waited); });
}

void Engine::abort(Group& group, const std::string& reason) {
  fail(group, Error(ErrorKind::Aborted, reason));
}

void Engine::fail(Group& group, const Error& error) {
  breakOff(group, [&] { group.fail(error); });
}

void Engine::watch(Group& group, std::function<void(const Error&)> action) {
  requireUsable();
  auto onFailure = [this, action = std::move(action)](const Error& error) {
    if (!hasThreads_) return action(error);
    {
      const std::lock_guard lock(threadMutex_);
      blocking_.push_back([action, error] { action(error); });
      mustBlock_.store(true);
    }
    threadChanged_.notify_one();
    // A progress thread may be asleep as the owner.
    process_->doorbell().ringSelf();
  };
  call([&] {
    watches_ = true;
    group.watch(std::move(onFailure));
    if (!shutDown_) activate(group);
    collectContinuations();
  });
  runContinuations();
}

std::optional<Error> Engine::failureOf(const Group& group) {
  std::optional<Error> error;
  call([&] { error = group.failure(); });
  return error;
}

void Engine::breakOff(Group& group, const std::function<void()>& failing) {
  if (!process_ || forkGeneration_ != forkGeneration()) return;
  call([&] {
    failing();
    if (!shutDown_) activate(group);
    collectContinuations();
  });
  runContinuations();
}

void Engine::finish(Completion& completion, std::optional<Error> error) {
  for (const auto& action : completion.finish(std::move(error))) action();
  wakeWaiters();
}

void Engine::call(const std::function<void()>& action) {
  if (tryOwn()) {
    std::exception_ptr error;
    try {
      drainInbox();
      action();
    } catch (...) {
      error = std::current_exception();
    }
    release();
    if (error) std::rethrow_exception(error);
    return;
  }
  struct Outcome {
    std::atomic<bool> done{false};
    std::exception_ptr error;
  } outcome;
  post([&] {
    try {
      action();
    } catch (...) {
      outcome.error = std::current_exception();
    }
    outcome.done.store(true, std::memory_order_release);
  });
  waitUntil([&] { return outcome.done.load(std::memory_order_acquire); });
  if (outcome.error) std::rethrow_exception(outcome.error);
}

}  // namespace smddp::engine
