#include "engine/engine.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <system_error>
#include <utility>

#include "common/config.h"
#include "common/log.h"
#include "engine/call.h"

namespace smddp::engine {
namespace {

// Before a sleep: see docs/threads.md for what each costs.
constexpr int kPauses = 20;
constexpr int kYields = 100;
// Between two looks at peers and deadlines while nothing advances.
constexpr Nanoseconds kLookPeriod = 5'000'000;
// How long a rank that is not in any call lets others wait for an answer.
constexpr auto kAnswerPeriod = std::chrono::milliseconds(250);
// A waiter looks whether it can take ownership at least this often.
constexpr auto kWaiterPeriod = std::chrono::milliseconds(1);
// What a peer that is still computing may delay our exit by.
constexpr Nanoseconds kFarewell = 2'000'000'000;
// Callbacks that wait for other operations at the same time; no sane program has so many.
constexpr size_t kMaxThreads = 64;
// Control messages kept for groups that this rank has yet to make.
constexpr size_t kMaxStashed = 1024;

// How long a fork may wait for the owner to come to a stop. Who is busier than that, in the set-up of the network
// for example, is not waited for; the child then keeps its copies of the connections.
constexpr auto kForkPatience = std::chrono::seconds(1);

std::atomic<uint32_t> forkGeneration{0};
// Held from before a fork until after it, and while the list changes.
std::mutex forkMutex;
// Engines whose connections a child must not keep alive. More than these are ranks as threads, which do not fork.
std::array<std::atomic<Engine*>, 8> engines{};

void enroll(Engine* engine) {
  const std::lock_guard lock(forkMutex);
  for (auto& slot : engines) {
    Engine* nobody = nullptr;
    if (slot.compare_exchange_strong(nobody, engine)) return;
  }
}

void strike(Engine* engine) {
  const std::lock_guard lock(forkMutex);
  for (auto& slot : engines) {
    Engine* expected = engine;
    slot.compare_exchange_strong(expected, nullptr);
  }
}

template <typename Action>
void forEachEngine(const Action& action) {
  for (auto& slot : engines) {
    if (Engine* engine = slot.load()) action(*engine);
  }
}

void beforeFork() {
  forkMutex.lock();
  forEachEngine([](Engine& engine) { engine.beforeFork(); });
}

void afterForkInParent() {
  forEachEngine([](Engine& engine) { engine.afterForkInParent(); });
  forkMutex.unlock();
}

void afterForkInChild() {
  ++forkGeneration;
  forEachEngine([](Engine& engine) { engine.afterForkInChild(); });
  forkMutex.unlock();
}

uint32_t watchForks() {
  static const int registered = pthread_atfork(&beforeFork, &afterForkInParent, &afterForkInChild);
  static_cast<void>(registered);
  return forkGeneration.load();
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

// How long nothing has happened, and what to do about it.
struct Engine::Patience {
  explicit Patience(bool patient) : rounds(patient ? kPauses : 0) {}
  // Whoever is waited for takes longer than a few pauses.
  bool yields() const { return rounds == kPauses; }
  // False: it is time to sleep.
  bool spin() {
    if (rounds++ < kPauses) {
      pause();
    } else if (rounds <= kPauses + kYields) {
      sched_yield();
    } else {
      return false;
    }
    return true;
  }
  int rounds;
};

Engine::Engine(Options options)
    : forkGeneration_(watchForks()),
      hasThreads_(options.progressThread),
      process_(std::make_unique<Process>(options.process)) {
  process_->onControl([this](Peer& from, transport::Bytes message) { dispatch(from, message); });
  if (options.progressThread) {
    const std::lock_guard lock(threadMutex_);
    threads_.emplace_back([this] { progressLoop(/*first=*/true); });
  }
  enroll(this);
}

// Keeps the owner, between two turns, until the fork is over.
struct Engine::ForkPause {
  std::mutex mutex;
  std::condition_variable changed;
  bool held = false;  // guarded by mutex, as is `over`
  bool over = false;

  void hold() {
    std::unique_lock lock(mutex);
    held = true;
    changed.notify_all();
    changed.wait(lock, [this] { return over; });
  }
  void end() {
    const std::lock_guard lock(mutex);
    over = true;
    changed.notify_all();
  }
};

void Engine::beforeFork() {
  ownedForFork_ = false;
  pausedForFork_.reset();
  // A child that forks again has nothing to hold still.
  if (forkGeneration_ != forkGeneration.load()) return;
  ownedForFork_ = tryOwn();
  if (ownedForFork_) return;
  auto pause = std::make_shared<ForkPause>();
  {
    // Not by post(), which may run what is posted on this thread.
    const std::lock_guard lock(inboxMutex_);
    inbox_.push_back([pause] { pause->hold(); });
    inboxSize_.store(inbox_.size());
  }
  process_->doorbell().ringSelf();
  const auto limit = std::chrono::steady_clock::now() + kForkPatience;
  std::unique_lock lock(pause->mutex);
  while (!pause->held && !ownedForFork_ && std::chrono::steady_clock::now() < limit) {
    pause->changed.wait_for(lock, kWaiterPeriod);
    // The owner let go before it looked into the inbox.
    ownedForFork_ = !pause->held && tryOwn();
  }
  if (pause->held) {
    pausedForFork_ = std::move(pause);
  } else {
    pause->over = true;
  }
}

void Engine::afterForkInParent() {
  if (ownedForFork_) release();
  if (pausedForFork_) pausedForFork_->end();
  pausedForFork_.reset();
}

void Engine::afterForkInChild() noexcept {
  if (ownedForFork_ || pausedForFork_) process_->closeInChild();
}

Engine::~Engine() { shutdown(); }

void Engine::requireUsable() const {
  if (!process_) raise(ErrorKind::Usage, "smddp has been shut down");
  if (forkGeneration_ != forkGeneration.load(std::memory_order_relaxed)) {
    raise(ErrorKind::Usage,
          "smddp cannot be used in a process that was forked after init_process_group(); "
          "initialise in the child instead, or start it with spawn");
  }
}

void Engine::shutdown() {
  if (forkGeneration_ != forkGeneration.load()) {
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
  if (!process_ || forkGeneration_ != forkGeneration.load()) return;
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

// An owner that threw past release() would leave everybody waiting for ever.
template <typename Action>
void Engine::guarded(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    failActive(error.what(), error.kind());
  } catch (const std::exception& error) {
    failActive(error.what(), ErrorKind::Internal);
  }
}

// --- operations -------------------------------------------------------------------------------------------

template <typename Operation>
CompletionPtr Engine::submitAny(Group& group, Operation operation) {
  requireUsable();
  auto completion = std::make_shared<Completion>();
  const bool willWait = operation.willWait;
  if (tryOwn()) {
    guarded([&] {
      drainInbox();
      group.submit(std::move(operation), completion);
      activate(group);
      if (willWait) {
        runOwned([&] { return completion->done(); }, /*patient=*/false);
      } else {
        turn();
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
                        const std::atomic<bool>& enough) {
  requireUsable();
  waitUntil([&] {
    return enough.load(std::memory_order_acquire) ||
           std::any_of(completions.begin(), completions.end(),
                       [](const auto& completion) { return completion->done(); });
  });
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

void Engine::breakOff(Group& group, const std::function<void()>& failing) {
  if (!process_ || forkGeneration_ != forkGeneration.load()) return;
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

// --- ownership --------------------------------------------------------------------------------------------

void Engine::post(std::function<void()> action) {
  {
    const std::lock_guard lock(inboxMutex_);
    inbox_.push_back(std::move(action));
    inboxSize_.store(inbox_.size());
  }
  process_->doorbell().ringSelf();
  // The owner may have let go between our look and the push: then somebody must take it up.
  if (tryOwn()) {
    drainInbox();
    release();
  }
}

void Engine::drainInbox() {
  while (inboxSize_.load(std::memory_order_acquire) > 0) {
    std::vector<std::function<void()>> actions;
    {
      const std::lock_guard lock(inboxMutex_);
      actions.swap(inbox_);
      inboxSize_.store(0);
    }
    for (const auto& action : actions) action();
    if (waiters_.load() > 0) {
      const std::lock_guard lock(waitMutex_);
      waitChanged_.notify_all();
    }
  }
}

void Engine::release() {
  const bool busy = !active_.empty();
  busy_.store(busy);
  owned_.store(false);
  if (waiters_.load() > 0) {
    const std::lock_guard lock(waitMutex_);
    waitChanged_.notify_all();
  } else if (busy && hasThreads_) {
    const std::lock_guard lock(threadMutex_);
    threadChanged_.notify_one();
  }
  // What was posted while we let go has no other taker.
  if (inboxSize_.load() > 0 && tryOwn()) {
    guarded([this] {
      drainInbox();
      turn();
    });
    release();
  }
}

void Engine::waitUntil(const std::function<bool()>& done) {
  bool asked = false;
  while (!done()) {
    if (tryOwn()) {
      guarded([&] { runOwned(done, /*patient=*/false); });
      release();
      runContinuations();
      continue;
    }
    std::unique_lock lock(waitMutex_);
    waiters_.fetch_add(1);
    // A progress thread that sleeps as the owner lets go when it sees us.
    if (!std::exchange(asked, true)) process_->doorbell().ringSelf();
    waitChanged_.wait_for(lock, kWaiterPeriod, [&] { return done() || !owned_.load(); });
    waiters_.fetch_sub(1);
  }
  // Our presence may have kept the progress thread from taking up what is left.
  if (busy_.load() && !owned_.load()) {
    const std::lock_guard lock(threadMutex_);
    threadChanged_.notify_one();
  }
}

void Engine::activate(Group& group) {
  if (std::find(active_.begin(), active_.end(), &group) == active_.end()) active_.push_back(&group);
}

bool Engine::turn() {
  bool advanced = false;
  bool messages = false;
  for (size_t i = 0; i < active_.size(); ++i) {
    advanced |= active_[i]->advance();
    messages |= active_[i]->needsPolling();
  }
  if (messages && process_->poll() > 0) advanced = true;
  if (advanced) {
    collectContinuations();
    if (waiters_.load(std::memory_order_relaxed) > 0) {
      const std::lock_guard lock(waitMutex_);
      waitChanged_.notify_all();
    }
  }
  return advanced;
}

bool Engine::step() {
  if (!tryOwn()) return false;
  bool advanced = true;
  guarded([&] {
    drainInbox();
    process_->poll();
    advanced = turn();
    if (!advanced) look();
  });
  release();
  runContinuations();
  return advanced;
}

// The slow path's look at everything that can go wrong.
void Engine::look() {
  process_->poll();
  process_->checkPeers();
  for (size_t i = 0; i < active_.size(); ++i) active_[i]->checkHealth();
  collectContinuations();
}

void Engine::collectContinuations() {
  const auto take = [this](Group& group) {
    for (auto& action : group.takeContinuations()) continuations_.push_back(std::move(action));
  };
  for (Group* group : active_) take(*group);
  for (auto& group : remains_) take(*group);
  if (!continuations_.empty()) ended_.store(true);
  std::erase_if(active_, [](Group* group) { return group->idle(); });
}

void Engine::runOwned(const std::function<bool()>& done, bool patient) {
  Patience patience(patient);
  process_->noteCore();
  while (true) {
    drainInbox();
    const bool advanced = turn();
    if (done() || !continuations_.empty()) return;
    // The progress thread leaves the field to a caller that waits, who pays no hand-over from then on.
    if (patient && waiters_.load() > 0) return;
    if (advanced) {
      patience = Patience(patient);
      continue;
    }
    if (patience.yields()) process_->moveApart();
    if (patience.spin()) continue;
    const Nanoseconds now = process_->clock().now();
    if (now >= nextLook_) {
      nextLook_ = now + kLookPeriod;
      look();
      if (done() || !continuations_.empty()) return;
    }
    process_->doorbell().prepare();
    if (inboxSize_.load() > 0 || turn() || done()) {
      process_->doorbell().cancel();
      continue;
    }
    const bool network = std::any_of(active_.begin(), active_.end(),
                                     [](Group* group) { return group->spansNodes(); });
    process_->sleep(std::max<Nanoseconds>(nextLook_ - process_->clock().now(), 1), network);
  }
}

// Called without ownership. A continuation is the user's code: what it throws is its own business.
void Engine::runContinuations() {
  while (ended_.load() && tryOwn()) {
    std::vector<std::function<void()>> ready;
    ready.swap(continuations_);
    ended_.store(false);
    release();
    for (const auto& action : ready) {
      try {
        action();
      } catch (const std::exception& error) {
        SMDDP_LOG(Warn, "engine", "a callback of a finished operation threw: {}", error.what());
      }
    }
  }
}

// A continuation may wait for a future that only a progress thread can complete: another one stands by then.
void Engine::keepOneIdle() {
  const std::lock_guard lock(threadMutex_);
  if (stop_ || idle_ > 0) return;
  if (threads_.size() >= kMaxThreads) {
    SMDDP_LOG(Warn, "engine", "{} callbacks of finished operations are at work or wait",
              threads_.size());
    return;
  }
  try {
    threads_.emplace_back([this] { progressLoop(/*first=*/false); });
  } catch (const std::system_error& error) {
    SMDDP_LOG(Warn, "engine", "no thread for progress beside callbacks: {}", error.what());
  }
}

void Engine::progressLoop(bool first) {
  pthread_setname_np(pthread_self(), "smddp-progress");
  std::optional<transport::shm::Lifeline> lifeline;
  if (first) lifeline.emplace(process_->sharedSlab());
  while (true) {
    {
      std::unique_lock lock(threadMutex_);
      ++idle_;
      // Whoever owns the engine tells us when he lets go of it with something left to do. While nothing is
      // in flight here, ranks of other nodes may wait for us and ask what we are doing.
      threadChanged_.wait_for(lock, kAnswerPeriod, [this] {
        return stop_ || (busy_.load() && waiters_.load() == 0 && !owned_.load());
      });
      --idle_;
      if (stop_) return;
    }
    if (!tryOwn()) continue;
    guarded([this] {
      if (process_->onFabric()) look();
      runOwned([this] { return active_.empty(); }, /*patient=*/true);
    });
    if (!continuations_.empty()) keepOneIdle();
    release();
    runContinuations();
  }
}

}  // namespace smddp::engine
