#include "process_group/device/calls.h"

#include <algorithm>

#include "process_group/errors.h"

namespace smddp::process_group::device {
namespace {

using c10::intrusive_ptr;

// The operations of one call, until the engine has them.
class WaitingOperations {
 public:
  WaitingOperations(std::shared_ptr<engine::Engine> engine,
                    std::shared_ptr<engine::groups::Group> group,
                    std::span<engine::calls::Request> requests,
                    std::span<engine::calls::Message> messages, const CallMemoryPtr& memory)
      : engine_(std::move(engine)),
        group_(std::move(group)),
        requests_(std::make_move_iterator(requests.begin()),
                  std::make_move_iterator(requests.end())),
        messages_(std::make_move_iterator(messages.begin()),
                  std::make_move_iterator(messages.end())) {
    for (auto& request : requests_) request.keepAlive = memory;
    for (auto& message : messages_) message.keepAlive = memory;
    for (size_t i = 0; i < requests_.size() + messages_.size(); ++i) {
      completions_.push_back(std::make_shared<engine::calls::Completion>());
    }
  }

  const Work::Completions& completions() const { return completions_; }
  Nanoseconds timeout() const {
    Nanoseconds longest = 0;
    for (const auto& request : requests_) longest = std::max(longest, request.timeout);
    for (const auto& message : messages_) longest = std::max(longest, message.timeout);
    return longest;
  }

  void beginOrEnd(const std::string& title) {
    try {
      begin();
    } catch (const Error& error) {
      end(error, title);
    }
  }

  // Ends those that have not begun. The other ranks wait for them, so they are told, unless this rank leaves.
  void end(const Error& error, const std::string& title) {
    const Error told(error.kind(), fmt::format("{}: {}", title, error.what()));
    if (error.kind() != ErrorKind::Aborted) engine_->fail(*group_, told);
    for (; begun_ < completions_.size(); ++begun_)
      engine_->progress().complete(*completions_[begun_], told);
  }

 private:
  void begin() {
    for (auto& request : requests_) {
      request.willWait = false;
      engine_->enqueue(*group_, std::move(request), completions_[begun_]);
      ++begun_;
    }
    for (auto& message : messages_) {
      engine_->enqueue(*group_, std::move(message), completions_[begun_]);
      ++begun_;
    }
  }

  const std::shared_ptr<engine::Engine> engine_;
  const std::shared_ptr<engine::groups::Group> group_;
  std::vector<engine::calls::Request> requests_;
  std::vector<engine::calls::Message> messages_;
  Work::Completions completions_;
  size_t begun_ = 0;
};

// The completion of one operation of a call that is carried out on the device. The turns have it as their action at the
// end, so it does not refer to them: else neither would be freed, nor the memory of the call.
class PartEnd {
 public:
  PartEnd(std::shared_ptr<engine::Engine> engine, engine::calls::CompletionPtr completion,
          std::string title)
      : engine_(std::move(engine)), completion_(std::move(completion)), title_(std::move(title)) {}

  // Does nothing the second time: close() may end it, too.
  void end(const std::optional<Error>& error) {
    if (ended_.exchange(true)) return;
    engine_->progress().complete(
        *completion_,
        error ? std::optional(Error(error->kind(), fmt::format("{}: {}", title_, error->what())))
              : std::nullopt);
  }

 private:
  const std::shared_ptr<engine::Engine> engine_;
  const engine::calls::CompletionPtr completion_;
  const std::string title_;
  std::atomic<bool> ended_{false};
};

// One operation of a call that is carried out on the device.
class Part {
 public:
  Part(std::shared_ptr<DeviceTurns> turns, std::shared_ptr<PartEnd> end)
      : turns_(std::move(turns)), end_(std::move(end)) {}

  DeviceTurns& turns() { return *turns_; }
  // From now on advance() carries it out.
  void beginTurns() {
    turns_->atEnd([end = end_](const std::optional<Error>& error) { end->end(error); });
  }

  // Returns what went wrong.
  std::optional<Error> advanceToEnd() {
    try {
      turns_->advanceToEnd();
      end_->end(std::nullopt);
      return std::nullopt;
    } catch (const Error& error) {
      return error;
    } catch (const std::exception& error) {
      return Error(ErrorKind::Transport, error.what());
    }
  }

  void fail(const Error& error) {
    turns_->giveUp(error);
    end_->end(error);
  }

 private:
  const std::shared_ptr<DeviceTurns> turns_;
  const std::shared_ptr<PartEnd> end_;
};

// Null for a call on the CPU.
std::shared_ptr<DeviceCopies> copiesOf(const Work::Call& call) {
  const auto& device = call.staging.device();
  return device ? static_cast<const StagedCall&>(*device).copies() : nullptr;
}

// Waits for the copies. False if they are not made before the deadline, or if the device fails: then the call is
// deferred, which meets the same and raises the error.
bool arrives(const DeviceCopies& copies, Deadline deadline) {
  try {
    return copies.awaitArrival(deadline);
  } catch (const c10::Error&) {
    return false;
  }
}

}  // namespace

void keepForGood(std::shared_ptr<void> memory) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<void>>;
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(memory));
}

std::shared_ptr<DeviceCall> Calls::begin(const CallKind& kind, const at::Tensor& first,
                                         const CallMemoryPtr& memory) {
  if (route_ != nullptr && kind.collective && route_->serves(*kind.collective, first, kind.op)) {
    return std::make_shared<DeviceStaging>(first.device(), memory);
  }
  return std::make_shared<HostStaging>(first.device(), memory,
                                       leavesNode(kind) ? sources_ : nullptr);
}

bool Calls::leavesNode(const CallKind& kind) const {
  const auto& topology = group_->membership.topology;
  if (!kind.collective) {
    return kind.receiver != CallKind::kNobody &&
           topology.nodeOf(kind.receiver) != topology.myNode();
  }
  return topology.numNodes() > 1 && topology.numNodes() == group_->spec.size;
}

intrusive_ptr<Work> Calls::submit(Work::Call call, std::span<engine::calls::Request> requests,
                                  std::span<engine::calls::Message> messages) {
  const auto& device = call.staging.device();
  if (device == nullptr || !device->takesSplits()) {
    return submitThroughHost(std::move(call), requests, messages);
  }
  SMDDP_CHECK(messages.empty(), "messages that stay on a GPU");
  return submitOnDevice(std::move(call), requests);
}

intrusive_ptr<Work> Calls::newWork(Work::Call call) const {
  return c10::make_intrusive<Work>(group_->spec.me, engine_, group_, std::move(call));
}

// Also for a call on the CPU that has to queue behind others.
intrusive_ptr<Work> Calls::submitThroughHost(Work::Call call,
                                             std::span<engine::calls::Request> requests,
                                             std::span<engine::calls::Message> messages) {
  const auto copies = copiesOf(call);
  if (copies) copies->seal();
  const bool collective = !requests.empty();
  const bool willWait =
      messages.empty() && std::all_of(requests.begin(), requests.end(),
                                      [](const auto& request) { return request.willWait; });
  auto operations =
      std::make_shared<WaitingOperations>(engine_, group_, requests, messages, call.memory);
  const auto deadline = Deadline::after(MonotonicClock(), operations->timeout());
  const std::string title = call.title;
  auto work = newWork(std::move(call));
  work->setOperations(operations->completions());
  if (copies && collective) remember(work, copies);
  // A caller that waits for the result waits for the device itself. So no other thread has to take over.
  if (willWait && copies && !deferred_.busy() && arrives(*copies, deadline)) {
    operations->beginOrEnd(title);
    return work;
  }
  deferred_.add({[copies] { return !copies || copies->arrived(); },
                 [operations, title] { operations->beginOrEnd(title); },
                 [operations, title](const Error& error) { operations->end(error, title); },
                 deadline});
  return work;
}

void Calls::remember(const intrusive_ptr<Work>& work, const std::shared_ptr<DeviceCopies>& copies) {
  const std::lock_guard lock(mutex_);
  latestDevice_ = copies->device();
  std::erase_if(unfinished_, [](const Unfinished& earlier) {
    return earlier.work.expired() && earlier.copies->ended();
  });
  unfinished_.push_back({c10::weak_intrusive_ptr<Work>(work), copies});
}

intrusive_ptr<Work> Calls::submitOnDevice(Work::Call call,
                                          std::span<const engine::calls::Request> requests) {
  const auto copies = copiesOf(call);
  const bool willWait = std::all_of(requests.begin(), requests.end(),
                                    [](const auto& request) { return request.willWait; });
  std::vector<std::shared_ptr<Part>> parts;
  Work::Completions completions;
  translated([&] {
    for (const auto& request : requests) {
      completions.push_back(std::make_shared<engine::calls::Completion>());
      parts.push_back(std::make_shared<Part>(
          route_->begin(request, copies, call.memory),
          std::make_shared<PartEnd>(engine_, completions.back(), call.title)));
    }
  });
  auto work = newWork(std::move(call));
  work->setOperations(std::move(completions));
  remember(work, copies);
  // A caller that waits for the result drives the call itself. So no other thread has to take over.
  if (willWait && !deferred_.busy()) {
    std::optional<Error> failed;
    for (const auto& part : parts) {
      if (!failed) failed = part->advanceToEnd();
      if (failed) part->fail(*failed);
    }
    return work;
  }
  for (const auto& part : parts) {
    part->beginTurns();
    // The turns have deadlines of their own, and their errors say more.
    deferred_.add({[part] { return part->turns().advance(); }, [] {},
                   [part](const Error& error) { part->fail(error); }, Deadline::never()});
  }
  return work;
}

void Calls::synchronize() {
  std::vector<Unfinished> calls;
  std::optional<c10::Device> device;
  {
    const std::lock_guard lock(mutex_);
    calls.swap(unfinished_);
    device = latestDevice_;
  }
  if (!device) return;
  currentStream(*device).synchronize();
  for (const Unfinished& call : calls) {
    if (const auto work = call.work.lock()) {
      translated([&] {
        for (const auto& completion : work->completions()) engine_->wait(*group_, *completion);
      });
      // Enqueues the copies back if nobody has.
      static_cast<void>(work->isCompleted());
    }
    call.copies->synchronize();
  }
}

}  // namespace smddp::process_group::device
