#include "process_group/process_group.h"

#include <algorithm>
#include <deque>
#include <numeric>
#include <optional>
#include <set>

#include "bootstrap/rendezvous.h"
#include "common/config.h"
#include "common/log.h"
#include "engine/shared_engine.h"
#include "engine/split.h"
#include "engine/wire_choice.h"
#include "process_group/checks.h"
#include "process_group/comm_tensors.h"
#include "process_group/comms_record.h"
#include "process_group/errors.h"
#include "process_group/store_adapter.h"
#include "process_group/timeouts.h"

namespace smddp::process_group {
namespace {

using c10::intrusive_ptr;
using collectives::Collective;
using engine::calls::Request;

// The default group, if it is one of ours. Never destroyed, as the engine.
struct WorldSlot {
  std::mutex mutex;
  std::weak_ptr<engine::groups::Group> group;
};
WorldSlot& worldSlot() {
  static auto* slot = new WorldSlot;
  return *slot;
}

// Groups in which this thread is coalescing, and the calls that it has made since and that may have something to say
// in the end.
std::map<const ProcessGroup*, std::deque<intrusive_ptr<Work>>>& coalescing() {
  thread_local std::map<const ProcessGroup*, std::deque<intrusive_ptr<Work>>> calls;
  return calls;
}

bool isWorld(const ProcessGroup::Creation& creation) {
  const std::string& name = creation.name;
  return creation.ranksOfWorld.empty() && (name == "default_pg" || name.empty() || name == "0");
}

// By rank: its number in the job.
std::vector<Rank> jobRanksOf(const ProcessGroup::Creation& creation) {
  return {creation.ranksOfWorld.begin(), creation.ranksOfWorld.end()};
}

// The engine for a new group. If there is none, the other ranks hear why.
std::shared_ptr<engine::Engine> engineFor(const ProcessGroup::Creation& creation) {
  if (isWorld(creation)) setLogRank(creation.rank);
  try {
    return engine::sharedEngine(settings());
  } catch (const Error& error) {
    reportTrouble(creation.store, creation.name, creation.rank,
                  bootstrap::jobRankOf(jobRanksOf(creation), creation.rank), error);
    throwAsTorch(error);
  }
}

// The ranks of a new group in the default group. Empty if that is not one of ours, or does not have all of them.
engine::Engine::KnownMembers knownMembersOf(const ProcessGroup::Creation& creation) {
  WorldSlot& slot = worldSlot();
  const std::lock_guard lock(slot.mutex);
  const auto world = slot.group.lock();
  const auto& ranks = creation.ranksOfWorld;
  const auto isOfWorld = [&](Rank rank) { return rank >= 0 && rank < world->spec.size; };
  if (!world || static_cast<int>(ranks.size()) != creation.size ||
      !std::all_of(ranks.begin(), ranks.end(), isOfWorld)) {
    return {};
  }
  return {world, {ranks.begin(), ranks.end()}};
}

}  // namespace

void reportTrouble(const intrusive_ptr<c10d::Store>& store, const std::string& name, int rank,
                   int jobRank, const Error& error) {
  // A courtesy to the others.
  constexpr Nanoseconds kPatience = 5'000'000'000;
  StoreAdapter adapter(store, kPatience);
  // Not settings(), which may be what is wrong.
  const Seal seal(environment("SMDDP_JOB_TOKEN"));
  bootstrap::reportTrouble(adapter, name, rank, jobRank, seal, error);
}

std::shared_ptr<engine::Engine> sharedEngine() {
  return translated([] { return engine::sharedEngine(settings()); });
}

ProcessGroup::ProcessGroup(const Creation& creation, std::unique_ptr<DeviceCalls> devices)
    : Backend(creation.rank, creation.size),
      engine_(engineFor(creation)),
      store_(creation.store),
      timeoutMs_(creation.timeout.count()),
      globalRanks_(creation.ranksOfWorld),
      devices_(std::move(devices)),
      spec_{creation.name, creation.rank, creation.size, creation.options, jobRanksOf(creation)},
      isDefault_(isWorld(creation)) {
  if (globalRanks_.empty()) {
    globalRanks_.resize(static_cast<size_t>(creation.size));
    std::iota(globalRanks_.begin(), globalRanks_.end(), 0);
  }
  if (!creation.waitsForMembers) {
    const Nanoseconds timeout = effectiveTimeout(creation.timeout);
    StoreAdapter adapter(creation.store, timeout);
    setMembers(translated([&] {
      auto group = engine_->createGroup(adapter, spec_, timeout, knownMembersOf(creation));
      engine::chooseWire(*engine_, group, timeout);
      return group;
    }));
  }
  init();
}

ProcessGroup::ProcessGroup(std::shared_ptr<engine::groups::Group> group,
                           std::chrono::milliseconds timeout, std::unique_ptr<DeviceCalls> devices)
    : Backend(group->spec.me, group->spec.size),
      engine_(sharedEngine()),
      timeoutMs_(timeout.count()),
      devices_(std::move(devices)),
      spec_(group->spec) {
  setMembers(std::move(group));
  init();
}

void ProcessGroup::setMembers(std::shared_ptr<engine::groups::Group> group) {
  if (isDefault_) {
    const std::lock_guard lock(worldSlot().mutex);
    worldSlot().group = group;
  }
  devices_->attach(engine_, group);
  members_.store(std::make_shared<Members>(engine_, std::move(group)));
}

ProcessGroup::~ProcessGroup() {
  try {
    leave();
  } catch (const std::exception& error) {
    SMDDP_LOG(Debug, "process_group", "while the group ended: {}", error.what());
  }
}

intrusive_ptr<c10d::Backend::Options> ProcessGroup::getBackendOptions() {
  return c10::make_intrusive<c10d::Backend::Options>(getBackendName(),
                                                     std::chrono::milliseconds(timeoutMs_.load()));
}

uint64_t ProcessGroup::getSequenceNumberForGroup() {
  const auto now = members();
  return now ? now->calls.script()->sequence.load() : 0;
}

void ProcessGroup::setTimeout(std::chrono::milliseconds timeout) { timeoutMs_ = timeout.count(); }

c10d::ErrorType ProcessGroup::getError() {
  const auto now = members();
  if (hasLeft_ || !now) return c10d::ErrorType::SUCCESS;
  std::optional<Error> error;
  engine_->progress().call([&] {
    if (const Error* found = now->group->errorOfNextOperation()) error = *found;
  });
  if (!error) return c10d::ErrorType::SUCCESS;
  return error->kind() == ErrorKind::Timeout    ? c10d::ErrorType::TIMEOUT
         : error->kind() == ErrorKind::PeerLost ? c10d::ErrorType::REMOTE_ERROR
                                                : c10d::ErrorType::COMM_ERROR;
}

void ProcessGroup::abortBecause(const std::string& reason) {
  const auto now = members();
  if (hasLeft_ || !now) return;
  const auto text =
      fmt::format("rank {} called abort(){}{}", now->group->membership.jobRank(getRank()),
                  reason.empty() ? "" : ": ", reason);
  for (const auto& group : engineGroups()) engine_->fail(*group, Error(ErrorKind::Aborted, text));
  devices_->close(Error(ErrorKind::Aborted, text));
  HookThread::ofThisProcess().groupFailed(hooks_, now->group->wasInterrupted());
}

void ProcessGroup::shutdown() {
  if (isEnding_.exchange(true)) return;
  try {
    std::vector<engine::calls::CompletionPtr> parts;
    {
      const std::lock_guard lock(partsMutex_);
      parts.swap(openParts_);
    }
    // The first is the script's, to which `parts` belong.
    for (const auto& group : engineGroups()) {
      engine_->waitForOpenCalls(*group, std::exchange(parts, {}));
    }
  } catch (...) {
    // A signal has ended the wait.
    leave();
    throw;
  }
  leave();
  // Torch removes the hooks next.
  if (!hooks_->completion.empty()) HookThread::ofThisProcess().waitForCalls();
}

void ProcessGroup::leave() {
  isEnding_.store(true);
  hasLeft_.store(true);
  coalescing().erase(this);
  devices_->close(Error(ErrorKind::Aborted, "the process group has been destroyed"));
  for (const auto& group : engineGroups()) engine_->destroyGroup(group);
}

std::vector<std::shared_ptr<engine::groups::Group>> ProcessGroup::engineGroups() const {
  const auto now = members();
  if (!now) return {};
  return now->calls.groups();
}

void ProcessGroup::requireOpen() const {
  if (isEnding_) {
    throw std::invalid_argument("smddp: this process group has been destroyed");
  }
}

std::shared_ptr<ProcessGroup::Members> ProcessGroup::requireMembers() const {
  auto now = members();
  if (!now) {
    throw std::invalid_argument(
        "smddp: this process group has no members yet (enable_reconfigure=True): call "
        "reconfigure() on each of them first");
  }
  return now;
}

std::shared_ptr<engine::groups::Group> ProcessGroup::group() const {
  requireOpen();
  return requireMembers()->group;
}

std::shared_ptr<CallOrder> ProcessGroup::order() {
  requireOpen();
  const auto now = requireMembers();
  const auto& parent = now->group;
  // Without a store the ranks have no place to meet. Then callbacks must not make calls that the script makes, too.
  if (!store_) return now->calls.script();
  return now->calls.current([&](const std::string& name) {
    engine::groups::GroupSpec spec = parent->spec;
    spec.name = name;
    spec.ofCallbacks = true;
    std::vector<Rank> all(static_cast<size_t>(getSize()));
    std::iota(all.begin(), all.end(), 0);
    const Nanoseconds timeout = effectiveTimeout(c10d::kUnsetTimeout);
    return translated([&] {
      StoreAdapter adapter(store_, timeout);
      auto made = engine_->createGroup(adapter, spec, timeout, {parent, std::move(all)});
      engine::chooseWire(*engine_, made, timeout);
      return made;
    });
  });
}

intrusive_ptr<c10d::Backend> ProcessGroup::split(
    const intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const intrusive_ptr<c10d::Backend::Options>& options) {
  const auto [group, timeout] = splitEngineGroup(store, ranks, options);
  if (!group) return nullptr;
  auto child = c10::make_intrusive<ProcessGroup>(group, timeout, devices_->forSplit());
  child->becomePartOf(*this, ranks, store);
  return child;
}

void ProcessGroup::becomePartOf(const ProcessGroup& parent, const std::vector<int>& ranks,
                                const intrusive_ptr<c10d::Store>& store) {
  store_ = store;
  for (const int rank : ranks) {
    globalRanks_.push_back(parent.globalRanks_.at(static_cast<size_t>(rank)));
  }
}

std::pair<std::shared_ptr<engine::groups::Group>, std::chrono::milliseconds>
ProcessGroup::splitEngineGroup(const intrusive_ptr<c10d::Store>& store,
                               const std::vector<int>& ranks,
                               const intrusive_ptr<c10d::Backend::Options>& options) {
  const std::vector<Rank> members(ranks.begin(), ranks.end());
  if (members.empty())
    throw std::invalid_argument("smddp: split_group expects ranks, but got none");
  std::set<Rank> different;
  for (const Rank rank : members) {
    requireRank("split_group", rank, getSize(), "member");
    if (different.insert(rank).second) continue;
    throw std::invalid_argument(
        fmt::format("smddp: split_group names rank {} twice among the members of a group", rank));
  }
  const auto timeout = options ? options->timeout : std::chrono::milliseconds(timeoutMs_.load());
  const auto parent = group();
  // torch calls this once for each device type, with the same store, and more often on ranks that get no group. So the
  // lists are compared only at the first call with a store.
  const auto isAgreedFor = [&] {
    const std::lock_guard lock(splitMutex_);
    return store && splitStore_.lock() == store;
  };
  if (!isAgreedFor()) {
    // The comparison is a call of the group: deferred calls must begin before it, or its number would differ between
    // ranks.
    devices_->drain();
    translated(
        [&] { engine::agreeOnMembers(*engine_, parent, members, effectiveTimeout(timeout)); });
    const std::lock_guard lock(splitMutex_);
    splitStore_ = c10::weak_intrusive_ptr<c10d::Store>(store);
  }
  const auto me = std::find(members.begin(), members.end(), getRank());
  if (me == members.end()) return {nullptr, timeout};
  const engine::groups::GroupSpec spec{options ? options->group_name : "",
                                       static_cast<Rank>(me - members.begin()),
                                       static_cast<int>(members.size()), parent->spec.options};
  auto child = translated([&] {
    auto split = engine::splitGroup(*engine_, parent, spec, members, effectiveTimeout(timeout));
    engine::chooseWire(*engine_, split, effectiveTimeout(timeout));
    return split;
  });
  return {std::move(child), timeout};
}

Nanoseconds ProcessGroup::effectiveTimeout(std::chrono::milliseconds timeout) const {
  if (timeout == c10d::kUnsetTimeout) timeout = std::chrono::milliseconds(timeoutMs_.load());
  return nanosecondsOf(timeout);
}

Request ProcessGroup::newRequest(Collective collective, std::chrono::milliseconds timeout,
                                 bool asyncOp) const {
  Request request;
  request.collective = collective;
  request.timeout = effectiveTimeout(timeout);
  request.willWait = !asyncOp;
  return request;
}

void ProcessGroup::addResidual(Request& request, at::TensorList inputs) {
  if (!group()->feedsBack(request)) return;
  request.residual = translated([&] { return residuals_.of(inputs); });
}

intrusive_ptr<Work> ProcessGroup::submit(Work::Call call, std::span<Request> requests,
                                         std::span<engine::calls::Message> messages) {
  // Calls on a device begin when it has filled their buffers, and in one order.
  const bool isDeferred = call.staging.device() || devices_->busy();
  if (!requests.empty() && !call.order)
    call.order = isDeferred ? requireMembers()->calls.script() : order();
  if (!requests.empty() && call.sequence == 0) call.sequence = ++call.order->sequence;
  // Asks for a profiler first: torch's macro takes longer than a small call before it does.
  if (!at::hasCallbacks()) {
    return submitUnrecorded(std::move(call), requests, messages);
  }
  const CommsRecord record(call);
  const GlobalRanks ranks = GlobalRanks::of(globalRanks_);
  const std::vector<int64_t> inputSplits = call.inputSplits, outputSplits = call.outputSplits;
  RECORD_PARAM_COMMS_DATA(record.sequence, std::make_tuple(getGroupUid(), getGroupDesc()),
                          record.inputs, record.outputs, getRank(), record.collective.c_str(),
                          record.inputElements, record.outputElements, record.type, inputSplits,
                          outputSplits, ranks.first, ranks.stride, getSize());
  return submitUnrecorded(std::move(call), requests, messages);
}

intrusive_ptr<Work> ProcessGroup::submitUnrecorded(Work::Call call, std::span<Request> requests,
                                                   std::span<engine::calls::Message> messages) {
  // For messages too, this throws if the group has been destroyed.
  const auto target = call.order ? call.order->group : group();
  call.hooks = hooks_;
  if (call.staging.device() || devices_->busy()) {
    auto work = devices_->submit(std::move(call), requests, messages);
    noteCoalesced(work);
    return work;
  }
  const bool willWait =
      messages.empty() && std::all_of(requests.begin(), requests.end(),
                                      [](const Request& request) { return request.willWait; });
  // The Work takes the call.
  const CallMemoryPtr memory = call.memory;
  auto work = c10::make_intrusive<Work>(getRank(), engine_, target, std::move(call));
  Work::Completions completions;
  completions.reserve(requests.size() + messages.size());
  translated([&] {
    for (Request& request : requests) {
      request.keepAlive = memory;
      // Only the last one has a caller that waits. While it waits, it runs those before it, too.
      request.willWait = willWait && &request == &requests.back();
      completions.push_back(engine_->submit(*target, std::move(request)));
    }
    for (engine::calls::Message& message : messages) {
      message.keepAlive = memory;
      completions.push_back(engine_->submit(*target, std::move(message)));
    }
  });
  work->setOperations(std::move(completions));
  noteCoalesced(work);
  return work;
}

void ProcessGroup::startCoalescing() { coalescing()[this].clear(); }

intrusive_ptr<c10d::Work> ProcessGroup::endCoalescing() {
  auto calls = coalescing().extract(this);
  if (calls.empty()) throw std::invalid_argument("smddp: coalescing ends that was not started");
  Work::Call call(c10d::OpType::COALESCED, "smddp:coalesced", {}, {});
  call.parts.assign(calls.mapped().begin(), calls.mapped().end());
  Work::Completions completions;
  for (const auto& part : call.parts) completions.append(part->completions());
  const bool isOrdered = std::all_of(call.parts.begin(), call.parts.end(),
                                     [](const auto& part) { return part->order() != nullptr; });
  if (isOrdered && !call.parts.empty()) call.order = call.parts.front()->order();
  const auto target = call.order ? call.order->group : group();
  auto work = c10::make_intrusive<Work>(getRank(), engine_, target, std::move(call));
  work->setOperations(std::move(completions));
  return work;
}

void ProcessGroup::noteOpen(const Work& work) {
  const std::lock_guard lock(partsMutex_);
  std::erase_if(openParts_, [](const auto& part) { return part->done(); });
  for (const auto& part : work.completions()) {
    if (!part->done()) openParts_.push_back(part);
  }
}

void ProcessGroup::noteCoalesced(const intrusive_ptr<Work>& work) {
  auto& groups = coalescing();
  if (groups.empty()) return;
  const auto found = groups.find(this);
  if (found == groups.end()) return;
  // After an exception within the block torch never ends the coalescing. Then all later calls come here.
  auto& calls = found->second;
  while (!calls.empty() && calls.front()->isCompleted() && calls.front()->isSuccess()) {
    calls.pop_front();
  }
  calls.push_back(work);
}

#ifdef C10D_BACKEND_HAS_HOOKS
void ProcessGroup::registerAbortHook(int64_t id, c10d::AbortHook hook) {
  hooks_->abort.add(id, std::move(hook));
  if (hasAbortHooks_.exchange(true)) return;
  if (const auto now = members()) watchForBreak(*now);
}

void ProcessGroup::watchForBreak(const Members& of) {
  translated([&] {
    engine_->onBreak(*of.group, [hooks = hooks_, weak = std::weak_ptr(of.group)](const Error&) {
      const auto group = weak.lock();
      HookThread::ofThisProcess().groupFailed(hooks, group && group->wasInterrupted());
    });
  });
}
#endif
#ifdef C10D_BACKEND_HAS_RECONFIGURE
engine::MeetingPoint& ProcessGroup::meetingPoint() const {
  requireOpen();
  if (!meetingPoint_) meetingPoint_.emplace(*engine_);
  return *meetingPoint_;
}

c10d::ReconfigureHandle ProcessGroup::get_reconfigure_handle() const {
  const std::lock_guard lock(meetingMutex_);
  return translated([&] { return meetingPoint().makeHandle(changes_, getRank()); });
}

intrusive_ptr<c10d::Work> ProcessGroup::reconfigure(const c10d::ReconfigureOptions& options) {
  const auto* set = std::get_if<std::unordered_set<c10d::ReconfigureHandle>>(&options.handles);
  const auto texts = set ? std::vector<std::string>(set->begin(), set->end())
                         : std::get<std::vector<c10d::ReconfigureHandle>>(options.handles);
  const Nanoseconds timeout =
      options.timeout ? nanosecondsOf(*options.timeout) : effectiveTimeout(c10d::kUnsetTimeout);
  const std::lock_guard lock(meetingMutex_);
  translated([&] {
    const auto handles = meetingPoint().parseHandles(texts, set != nullptr);
    changeMembers(handles, options.uuid, timeout);
  });
  return c10::make_intrusive<Work>(rank_, engine_, group(),
                                   Work::Call(c10d::OpType::UNKNOWN, "smddp:reconfigure", {}, {}));
}

void ProcessGroup::changeMembers(const std::vector<bootstrap::Handle>& handles, int64_t uuid,
                                 Nanoseconds timeout) {
  const auto made = meetingPoint().meet(spec_, handles, uuid, timeout);
  engine::chooseWire(*engine_, made, timeout);
  ++changes_;
  const auto before = engineGroups();
  setMembers(made);
  rank_ = made->spec.me;
  size_ = made->spec.size;
  globalRanks_.resize(static_cast<size_t>(size_));
  std::iota(globalRanks_.begin(), globalRanks_.end(), 0);
  // Its host may be one of those that are gone.
  store_ = nullptr;
  if (isDefault_) setLogRank(rank_);
#ifdef C10D_BACKEND_HAS_HOOKS
  hooks_->hasFailed = false;
  if (hasAbortHooks_ && !outlivesLosses_) watchForBreak(*members());
#endif
  for (const auto& old : before) {
    engine_->destroyGroup(old, "changed the members of the group (reconfigure)");
  }
}
#endif
#if SMDDP_TORCH_VERSION_MINOR >= 15
void ProcessGroup::registerCompletionHook(int64_t id, c10d::CompletionHook hook) {
  hooks_->completion.add(id, [hook = std::move(hook)](uint64_t key, float milliseconds) {
    hook({key, milliseconds});
  });
}
#endif

bool ProcessGroup::supportsTensorAlloc(c10::DeviceIndex device) {
  // DDP asks with the index of a CPU tensor's device, which is negative.
  return settings().commMemory && device < 0;
}

at::Tensor ProcessGroup::allocateTensor(long size, at::TensorOptions options) {
  return emptyTensor({size}, options);
}

std::map<std::string, engine::plans::AlgorithmUse> ProcessGroup::statistics() {
  std::map<std::string, engine::plans::AlgorithmUse> result;
  const auto now = members();
  if (now) engine_->progress().call([&] { result = now->group->plans.statistics(); });
  return result;
}

std::string ProcessGroup::describe() {
  const auto now = members();
  if (!now) return fmt::format("group \"{}\": no members yet", spec_.name);
  std::string text;
  translated([&] {
    engine_->progress().call([&] {
      text = now->group->describe();
      if (now->group->membership.spansNodes()) text += "; " + engine_->process().describeFabric();
    });
  });
  return text;
}

}  // namespace smddp::process_group
