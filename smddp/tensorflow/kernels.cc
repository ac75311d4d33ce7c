// TensorFlow's operations for collectives, on the C interface of smddp (smddp.h). kernels.py compiles this file for the
// installed TensorFlow.
//
// In a graph an operation begins its collectives and returns; TensorFlow's threads never wait for other ranks. What the
// collectives end continues on TensorFlow's threads, not on the engine's. Eager code waits on its own thread.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "smddp.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/unbounded_work_queue.h"

namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::DataType;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

absl::Status lastError() {
  // InternalError, because TensorFlow does not retry that kind.
  return absl::InternalError(smddp_error());
}

absl::Status typeOf(DataType type, smddp_type* found) {
  switch (type) {
    case tensorflow::DT_FLOAT: *found = SMDDP_FLOAT32; break;
    case tensorflow::DT_DOUBLE: *found = SMDDP_FLOAT64; break;
    case tensorflow::DT_HALF: *found = SMDDP_FLOAT16; break;
    case tensorflow::DT_BFLOAT16: *found = SMDDP_BFLOAT16; break;
    case tensorflow::DT_COMPLEX64: *found = SMDDP_COMPLEX64; break;
    case tensorflow::DT_COMPLEX128: *found = SMDDP_COMPLEX128; break;
    case tensorflow::DT_INT8: *found = SMDDP_INT8; break;
    case tensorflow::DT_INT16: *found = SMDDP_INT16; break;
    case tensorflow::DT_INT32: *found = SMDDP_INT32; break;
    case tensorflow::DT_INT64: *found = SMDDP_INT64; break;
    case tensorflow::DT_UINT8: *found = SMDDP_UINT8; break;
    case tensorflow::DT_UINT16: *found = SMDDP_UINT16; break;
    case tensorflow::DT_UINT32: *found = SMDDP_UINT32; break;
    case tensorflow::DT_UINT64: *found = SMDDP_UINT64; break;
    case tensorflow::DT_BOOL: *found = SMDDP_BOOL; break;
    default:
      return absl::InvalidArgumentError("smddp: tensors of " + tensorflow::DataTypeString(type) +
                                        " cannot be communicated");
  }
  return absl::OkStatus();
}

absl::Status hasLeft() {
  return absl::FailedPreconditionError(
      "smddp: this rank has left the job in which the operation was made: make it again after "
      "init()");
}

class Group;

// Puts the operations of a step in the order of their numbers. A graph runs them in any order, which may differ between
// ranks. Once an operation cannot run, all that follow fail: this rank would pair them with other ones of other ranks.
class Order : public std::enable_shared_from_this<Order> {
 public:
  Order(std::weak_ptr<Group> group, int count) : group_(std::move(group)), count_(count) {}

  // Would an operation with this number not have to wait for another one?
  bool isNext(int number) {
    const std::lock_guard lock(mutex_);
    return number == next_ || !broken_.ok();
  }

  // Runs `action` when those with smaller numbers have run; or `failed`, if they have not come after `seconds`, or the
  // run of the graph is cancelled, because another operation has failed. One of them, once.
  void enter(int number, double seconds, OpKernelContext* context, std::function<void()> action,
             std::function<void(const absl::Status&)> failed) {
    auto* env = context->env();
    auto* cancellation = context->cancellation_manager();
    const auto token = cancellation ? cancellation->get_cancellation_token() : 0;
    if (cancellation) {
      cancellation->RegisterCallback(token, [self = shared_from_this(), cancellation, token] {
        self->cancel(cancellation, token);
      });
    }
    const auto wait = std::chrono::duration<double>(seconds);
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(wait);
    const Entry entry{deadline, cancellation, token, std::move(action), std::move(failed)};
    absl::Status broken;
    bool mustRun = false, isCancelled = false;
    {
      const std::lock_guard lock(mutex_);
      broken = broken_;
      if (broken.ok()) {
        waiting_.insert({number, entry});
        // From now on, without the mutex, the context may be gone. The callback may have come too early.
        isCancelled = cancellation && cancellation->IsCancelled();
        mustRun = !isRunning_ && number == next_;
        isRunning_ = isRunning_ || mustRun;
        watch(env);
      }
    }
    if (!broken.ok()) return entry.end(broken);
    if (mustRun) return run(env);
    if (isCancelled) cancel(cancellation, token);
  }

  // Ends what waits, and lets what comes later fail.
  void fail(const absl::Status& status) {
    Entries ended;
    {
      const std::lock_guard lock(mutex_);
      if (!broken_.ok()) return;
      broken_ = status;
      ended.swap(waiting_);
    }
    for (const auto& [number, entry] : ended) entry.end(status);
  }

 private:
  using Clock = std::chrono::steady_clock;

  struct Entry {
    Clock::time_point deadline;
    tensorflow::CancellationManager* cancellation;
    tensorflow::CancellationToken token;
    std::function<void()> action;
    std::function<void(const absl::Status&)> failed;

    void end(const absl::Status& status) const {
      forget();
      failed(status);
    }

    void forget() const {
      if (cancellation) cancellation->TryDeregisterCallback(token);
    }
  };

  using Entries = std::multimap<int, Entry>;  // by number; those of one number as they came

  // Runs what is next, until that has not come yet.
  void run(tensorflow::Env* env) {
    while (true) {
      Entries::node_type entry;
      {
        const std::lock_guard lock(mutex_);
        entry = waiting_.extract(next_);
        if (entry.empty()) {
          isRunning_ = false;
          watch(env);
          return;
        }
        next_ = (next_ + 1) % count_;
      }
      entry.mapped().forget();
      entry.mapped().action();
    }
  }

  // Needs the mutex. A thread of TensorFlow sleeps for this until the first deadline, also if all goes well meanwhile;
  // so it is one thread, and not one for each operation.
  void watch(tensorflow::Env* env) {
    if (isWatched_ || waiting_.empty() || isRunning_) return;
    isWatched_ = true;
    const auto first =
        std::min_element(waiting_.begin(), waiting_.end(), [](const auto& one, const auto& other) {
          return one.second.deadline < other.second.deadline;
        });
    const auto wait =
        std::chrono::ceil<std::chrono::microseconds>(first->second.deadline - Clock::now());
    env->SchedClosureAfter(std::max<int64_t>(wait.count(), 0),
                           [self = shared_from_this(), env] { self->expire(env); });
  }

  void expire(tensorflow::Env* env) {
    std::string missing;
    {
      const std::lock_guard lock(mutex_);
      isWatched_ = false;
      const auto now = Clock::now();
      for (const auto& [number, entry] : waiting_) {
        if (entry.deadline <= now) missing = missingBefore(number);
      }
      if (missing.empty()) watch(env);
    }
    if (!missing.empty()) giveUp(absl::DeadlineExceededError(missing));
  }

  void cancel(const tensorflow::CancellationManager* cancellation,
              tensorflow::CancellationToken token) {
    std::string missing;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [number, entry] : waiting_) {
        // Each of them counts its tokens from the beginning.
        if (entry.cancellation == cancellation && entry.token == token) {
          missing = missingBefore(number);
        }
      }
    }
    if (!missing.empty()) {
      giveUp(absl::CancelledError(missing + ", and will not: another operation has failed"));
    }
  }

  std::string missingBefore(int number) const {
    return "smddp: allreduce: number " + std::to_string(next_) + " of " + std::to_string(count_) +
           " has not come, which has to go before number " + std::to_string(number);
  }

  // Other ranks wait for this one in an operation that will not come.
  void giveUp(const absl::Status& status);

  const std::weak_ptr<Group> group_;
  const int count_;
  std::mutex mutex_;
  Entries waiting_;
  int next_ = 0;
  bool isRunning_ = false, isWatched_ = false;
  absl::Status broken_;
};

// A group, as operations know it: by a number that no other group gets, because functions of TensorFlow may outlive a
// group, whose address may come again.
class Group : public std::enable_shared_from_this<Group> {
 public:
  // Adds a group to those of this process, and returns its number.
  static int64_t add(smddp_group* handle) {
    const std::lock_guard lock(registryMutex());
    registry()[++last()] = std::make_shared<Group>(handle);
    return last();
  }

  // Null after the group was left.
  static std::shared_ptr<Group> find(int64_t number) {
    const std::lock_guard lock(registryMutex());
    const auto found = registry().find(number);
    return found == registry().end() ? nullptr : found->second;
  }

  static void leave(int64_t number) {
    std::shared_ptr<Group> left;
    {
      const std::lock_guard lock(registryMutex());
      const auto found = registry().find(number);
      if (found == registry().end()) return;
      left = found->second;
      registry().erase(found);
    }
    {
      const std::lock_guard lock(left->mutex_);
      left->handle_ = nullptr;
    }
    left->fail(hasLeft());
  }

  explicit Group(smddp_group* handle) : size_(smddp_size(handle)), handle_(handle) {}

  int size() const { return size_; }

  absl::Status begin(const smddp_arguments& arguments, smddp_operation** operation) {
    const std::lock_guard lock(mutex_);
    if (!handle_) {
      arguments.release(arguments.held);
      return hasLeft();
    }
    const smddp_status status = smddp_begin(handle_, &arguments, operation);
    if (status == SMDDP_OK) return absl::OkStatus();
    return status == SMDDP_USAGE ? absl::InvalidArgumentError(smddp_error()) : lastError();
  }

  std::shared_ptr<Order> orderOf(int count) {
    const std::lock_guard lock(mutex_);
    auto& order = orders_[count];
    if (!order) order = std::make_shared<Order>(weak_from_this(), count);
    return order;
  }

  // Ends what waits for its turn.
  void fail(const absl::Status& status) {
    std::map<int, std::shared_ptr<Order>> orders;
    {
      const std::lock_guard lock(mutex_);
      orders = orders_;
    }
    for (const auto& [count, order] : orders) order->fail(status);
  }

  // Does so on this rank, and ends what is in flight on all ranks.
  void abort(const absl::Status& status) {
    fail(status);
    const std::lock_guard lock(mutex_);
    if (handle_) smddp_abort(handle_, std::string(status.message()).c_str());
  }

 private:
  static std::mutex& registryMutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }

  static std::map<int64_t, std::shared_ptr<Group>>& registry() {
    static auto* groups = new std::map<int64_t, std::shared_ptr<Group>>;
    return *groups;
  }

  static int64_t& last() {
    static int64_t number = 0;
    return number;
  }

  const int size_;
  std::mutex mutex_;
  smddp_group* handle_;                           // null after it was left
  std::map<int, std::shared_ptr<Order>> orders_;  // by count
};

void Order::giveUp(const absl::Status& status) {
  if (const auto group = group_.lock()) group->abort(status);
}

// Is this thread TensorFlow's, and begins a collective?
thread_local bool isBeginning = false;

// Runs of operations, for who wants to know whether they go on.
std::atomic<int64_t> begun{0}, ended{0};

class Collective;

// The collectives of one run of an operation.
struct Run {
  OpKernelContext* context;
  AsyncOpKernel::DoneCallback done;
  Collective* kernel;
  std::atomic<size_t> left;
  std::mutex mutex;
  absl::Status status = absl::OkStatus();  // the first error

  void end(const absl::Status& outcome) {
    if (!outcome.ok()) {
      const std::lock_guard lock(mutex);
      if (status.ok()) status = outcome;
    }
    if (left.fetch_sub(1) != 1) return;
    if (isBeginning) {
      isBeginning = false;  // finish() may run other operations
      finish();
    } else {
      // Not here: this is the engine's thread, and TensorFlow may go on with any kernel, which may wait. The queue has
      // a thread for each that waits, and keeps threads, which Env::SchedClosure does not.
      static auto* queue = new tensorflow::UnboundedWorkQueue(context->env(), "smddp");
      queue->Schedule([this] { finish(); });
    }
  }

  void finish();
};

struct Begun {
  Run* run;
  smddp_operation* operation;
};

// A collective that is to begin, and its tensors.
struct Call {
  smddp_arguments arguments;
  Tensor input, output;
};

class Collective : public AsyncOpKernel {
 public:
  Collective(OpKernelConstruction* construction, smddp_collective collective)
      : AsyncOpKernel(construction), collective_(collective) {
    int64_t group = 0;
    OP_REQUIRES_OK(construction, construction->GetAttr("group", &group));
    group_ = Group::find(group);
    OP_REQUIRES(construction, group_, hasLeft());
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) final {
    std::vector<Call> calls;
    OP_REQUIRES_OK_ASYNC(context, prepare(context, &calls), done);
    ++begun;
    auto* run = new Run{context, std::move(done), this, calls.size()};
    enter(
        context,
        [this, run, calls] {
          for (const Call& call : calls) begin(run, call);
        },
        [run](const absl::Status& status) {
          for (size_t left = run->left; left > 0; --left) run->end(status);
        });
  }

  // Eager code calls this, on its own thread, and waits here: that saves two changes of threads.
  void Compute(OpKernelContext* context) override {
    std::vector<Call> calls;
    OP_REQUIRES_OK(context, prepare(context, &calls));
    ++begun;
    absl::Notification hasEntered;
    absl::Status status;
    std::vector<smddp_operation*> operations;
    enter(
        context,
        [&] {
          for (const Call& call : calls) {
            smddp_operation* operation = nullptr;
            status.Update(beginHeld(call, &operation));
            if (operation) operations.push_back(operation);
          }
          hasEntered.Notify();
        },
        [&](const absl::Status& failed) {
          status = failed;
          hasEntered.Notify();
        });
    hasEntered.WaitForNotification();
    for (smddp_operation* operation : operations) {
      // Not without end: waits that are longer than 100 ms run smddp.numpy's function for Ctrl-C, and on this thread
      // Python would raise KeyboardInterrupt there.
      smddp_status outcome = SMDDP_PENDING;
      while (outcome == SMDDP_PENDING) outcome = smddp_wait(operation, 0.05);
      if (outcome != SMDDP_OK) status.Update(lastError());
      smddp_free(operation);
    }
    if (!status.ok()) {
      fail(status);
      context->SetStatus(status);
    }
    ++ended;
  }

  // After a run with an error.
  virtual void fail(const absl::Status& /*status*/) {}

 protected:
  // Makes the outputs, and appends the collectives.
  virtual absl::Status prepare(OpKernelContext* context, std::vector<Call>* calls) = 0;

  // Calls `beginAll`, which begins the collectives of a run, once it is their turn; or `failed`.
  virtual void enter(OpKernelContext* /*context*/, std::function<void()> beginAll,
                     std::function<void(const absl::Status&)> /*failed*/) {
    beginAll();
  }

  Group& group() const { return *group_; }

 private:
  void begin(Run* run, const Call& call) {
    isBeginning = true;
    smddp_operation* operation = nullptr;
    if (const absl::Status status = beginHeld(call, &operation); !status.ok()) {
      run->end(status);
    } else {
      smddp_then(
          operation,
          [](void* argument) {
            const std::unique_ptr<Begun> begun(static_cast<Begun*>(argument));
            const bool isGood = smddp_wait(begun->operation, 0) == SMDDP_OK;
            const absl::Status outcome = isGood ? absl::OkStatus() : lastError();
            smddp_free(begun->operation);
            begun->run->end(outcome);
          },
          new Begun{run, operation});
    }
    isBeginning = false;
  }

  // Begins a collective, which keeps the tensors: the engine may write to them after an error.
  absl::Status beginHeld(const Call& call, smddp_operation** operation) {
    smddp_arguments arguments = call.arguments;
    if (absl::Status status = typeOf(call.input.dtype(), &arguments.type); !status.ok()) {
      return status;
    }
    arguments.collective = collective_;
    arguments.input = call.input.data();
    arguments.output = call.output.data();
    auto held = std::make_unique<std::pair<Tensor, Tensor>>(call.input, call.output);
    arguments.held = held.release();
    arguments.release = [](void* tensors) {
      delete static_cast<std::pair<Tensor, Tensor>*>(tensors);
    };
    return group_->begin(arguments, operation);
  }

  const smddp_collective collective_;
  std::shared_ptr<Group> group_;
};

void Run::finish() {
  if (!status.ok()) {
    context->SetStatus(status);
    kernel->fail(status);
  }
  const auto callback = std::move(done);
  delete this;
  ++ended;
  callback();
}

class AllReduceInOrder : public Collective {
 public:
  explicit AllReduceInOrder(OpKernelConstruction* construction)
      : Collective(construction, SMDDP_ALLREDUCE) {
    OP_REQUIRES_OK(construction, construction->GetAttr("op", &op_));
  }

 private:
  absl::Status prepare(OpKernelContext* context, std::vector<Call>* calls) final {
    for (int i = 0; i < context->num_outputs(); ++i) {
      Tensor* output = nullptr;
      TF_RETURN_IF_ERROR(
          context->forward_input_or_allocate_output({i}, i, context->input(i).shape(), &output));
      smddp_arguments arguments{};
      arguments.count = output->NumElements();
      arguments.op = static_cast<smddp_op>(op_);
      calls->push_back({arguments, context->input(i), *output});
    }
    return absl::OkStatus();
  }

  int op_ = 0;
};

class AllReduce final : public AllReduceInOrder {
 public:
  explicit AllReduce(OpKernelConstruction* construction) : AllReduceInOrder(construction) {
    if (!construction->status().ok()) return;
    OP_REQUIRES_OK(construction, construction->GetAttr("number", &number_));
    OP_REQUIRES_OK(construction, construction->GetAttr("count", &count_));
    OP_REQUIRES_OK(construction, construction->GetAttr("timeout", &timeout_));
    order_ = group().orderOf(count_);
  }

  // This is the thread that would have to make the calls with smaller numbers.
  void Compute(OpKernelContext* context) override {
    if (order_->isNext(number_)) {
      Collective::Compute(context);
    } else {
      context->SetStatus(absl::InvalidArgumentError(
          "smddp: allreduce: it is not the turn of number " + std::to_string(number_) + " of " +
          std::to_string(count_) +
          ": eager code makes the calls of a step in the order of their numbers, once each; only "
          "inside tf.function any order will do"));
    }
  }

  // Calls that follow must not run, unless this one made no sense: then the group is as it was.
  void fail(const absl::Status& status) override {
    if (!absl::IsInvalidArgument(status)) order_->fail(status);
  }

 private:
  void enter(OpKernelContext* context, std::function<void()> beginAll,
             std::function<void(const absl::Status&)> failed) override {
    order_->enter(number_, timeout_, context, std::move(beginAll), std::move(failed));
  }

  int number_ = 0, count_ = 0;
  float timeout_ = 0;
  std::shared_ptr<Order> order_;
};

class Broadcast final : public Collective {
 public:
  explicit Broadcast(OpKernelConstruction* construction)
      : Collective(construction, SMDDP_BROADCAST) {
    OP_REQUIRES_OK(construction, construction->GetAttr("root", &root_));
  }

 private:
  absl::Status prepare(OpKernelContext* context, std::vector<Call>* calls) override {
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(
        context->forward_input_or_allocate_output({0}, 0, context->input(0).shape(), &output));
    smddp_arguments arguments{};
    arguments.count = output->NumElements();
    arguments.root = root_;
    calls->push_back({arguments, context->input(0), *output});
    return absl::OkStatus();
  }

  int root_ = 0;
};

class AllGather final : public Collective {
 public:
  explicit AllGather(OpKernelConstruction* construction)
      : Collective(construction, SMDDP_ALLGATHER) {}

 private:
  // A tensor of each rank, of one shape: [ranks, ...].
  absl::Status prepare(OpKernelContext* context, std::vector<Call>* calls) override {
    const Tensor& input = context->input(0);
    tensorflow::TensorShape shape = input.shape();
    shape.InsertDim(0, group().size());
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(0, shape, &output));
    smddp_arguments arguments{};
    arguments.count = input.NumElements();
    calls->push_back({arguments, input, *output});
    return absl::OkStatus();
  }
};

#define SMDDP_TYPES                                                                           \
  "{half, bfloat16, float, double, complex64, complex128, int8, int16, int32, int64, uint8, " \
  "uint16, uint32, uint64, bool}"

absl::Status unchangedShapes(tensorflow::shape_inference::InferenceContext* context) {
  for (int i = 0; i < context->num_outputs(); ++i) context->set_output(i, context->input(i));
  return absl::OkStatus();
}

// Sums, or whatever `op` (smddp_op) says, each of the tensors over ranks, in the order of the program: TensorFlow keeps
// the order of what uses one resource, `order`, also where a function is called that does so.
REGISTER_OP("SmddpAllreduceInOrder")
    .Input("tensors: T")
    .Input("order: resource")
    .Output("results: T")
    .Attr("T: list(" SMDDP_TYPES ") >= 1")
    .Attr("group: int")
    .Attr("op: int")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(unchangedShapes);

// As above, but operations begin in the order of their numbers, 0 to count - 1, once each and then from the beginning.
// kernels.py tells TensorFlow not to keep the order of the program for this one: `order` counts only where functions
// are called that have such operations.
REGISTER_OP("SmddpAllreduce")
    .Input("tensors: T")
    .Input("order: resource")
    .Output("results: T")
    .Attr("T: list(" SMDDP_TYPES ") >= 1")
    .Attr("group: int")
    .Attr("op: int")
    .Attr("number: int")
    .Attr("count: int")
    .Attr("timeout: float")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(unchangedShapes);

REGISTER_OP("SmddpBroadcast")
    .Input("tensor: T")
    .Input("order: resource")
    .Output("result: T")
    .Attr("T: " SMDDP_TYPES)
    .Attr("group: int")
    .Attr("root: int")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(unchangedShapes);

REGISTER_OP("SmddpAllgather")
    .Input("tensor: T")
    .Input("order: resource")
    .Output("result: T")
    .Attr("T: " SMDDP_TYPES)
    .Attr("group: int")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      int64_t number = 0;
      TF_RETURN_IF_ERROR(context->GetAttr("group", &number));
      const auto group = Group::find(number);
      const auto ranks = group ? context->MakeDim(group->size()) : context->UnknownDim();
      tensorflow::shape_inference::ShapeHandle result;
      TF_RETURN_IF_ERROR(context->Concatenate(context->Vector(ranks), context->input(0), &result));
      context->set_output(0, result);
      return absl::OkStatus();
    });

REGISTER_KERNEL_BUILDER(Name("SmddpAllreduce").Device(tensorflow::DEVICE_CPU), AllReduce);
REGISTER_KERNEL_BUILDER(Name("SmddpAllreduceInOrder").Device(tensorflow::DEVICE_CPU),
                        AllReduceInOrder);
REGISTER_KERNEL_BUILDER(Name("SmddpBroadcast").Device(tensorflow::DEVICE_CPU), Broadcast);
REGISTER_KERNEL_BUILDER(Name("SmddpAllgather").Device(tensorflow::DEVICE_CPU), AllGather);

}  // namespace

// For kernels.py.
extern "C" {

SMDDP_API int64_t smddp_kernels_add(void* group) {
  return Group::add(static_cast<smddp_group*>(group));
}

SMDDP_API void smddp_kernels_leave(int64_t number) { Group::leave(number); }

SMDDP_API void smddp_kernels_abort(int64_t number, const char* reason) {
  if (const auto group = Group::find(number)) group->abort(absl::CancelledError(reason));
}

SMDDP_API int64_t smddp_kernels_ended() { return ended; }

SMDDP_API int64_t smddp_kernels_begun() { return begun; }

}  // extern "C"
