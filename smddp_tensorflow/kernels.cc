// TensorFlow's operations for collectives, on the C interface of smddp (smddp.h). kernels.py compiles this file for the
// installed TensorFlow.
//
// An operation begins its collectives and returns; TensorFlow's threads never wait for other ranks. What the collectives
// end continues on TensorFlow's threads, not on the engine's.
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

#include "smddp.h"
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
  // Of the kind that TensorFlow does not retry.
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

// Puts the operations of a step in the order of their numbers. A graph runs them in any order, which may differ between
// ranks.
class Order {
 public:
  explicit Order(int count) : count_(count) {}

  // Runs `action` when those with smaller numbers have run; `expired`, with what is missing, if they have not come after
  // `seconds`. One of them, once.
  void enter(int number, double seconds, tensorflow::Env* env, std::function<void()> action,
             std::function<void(const std::string&)> expired) {
    const auto wait = std::chrono::duration<double>(seconds);
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(wait);
    {
      const std::lock_guard lock(mutex_);
      waiting_.insert({number, {deadline, std::move(action), std::move(expired)}});
      if (isRunning_) return;
      isRunning_ = true;
    }
    run(env);
  }

 private:
  using Clock = std::chrono::steady_clock;

  struct Entry {
    Clock::time_point deadline;
    std::function<void()> action;
    std::function<void(const std::string&)> expired;
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
      entry.mapped().action();
    }
  }

  // Lets what waits expire. Needs the mutex. A thread of TensorFlow sleeps for this until the first deadline, also if all
  // goes well meanwhile; so it is one thread, and not one for each operation.
  void watch(tensorflow::Env* env) {
    if (isWatched_ || waiting_.empty()) return;
    isWatched_ = true;
    const auto first =
        std::min_element(waiting_.begin(), waiting_.end(), [](const auto& one, const auto& other) {
          return one.second.deadline < other.second.deadline;
        });
    const auto wait =
        std::chrono::ceil<std::chrono::microseconds>(first->second.deadline - Clock::now());
    env->SchedClosureAfter(std::max<int64_t>(wait.count(), 0), [this, env] { expire(env); });
  }

  void expire(tensorflow::Env* env) {
    Entries late;
    int missing = 0;
    {
      const std::lock_guard lock(mutex_);
      const auto now = Clock::now();
      for (auto at = waiting_.begin(); at != waiting_.end();) {
        const auto entry = at++;
        if (entry->second.deadline <= now) late.insert(waiting_.extract(entry));
      }
      missing = next_;
      isWatched_ = false;
      watch(env);
    }
    for (const auto& [number, entry] : late) {
      entry.expired("number " + std::to_string(missing) + " of " + std::to_string(count_) +
                    " has not come, which has to go before number " + std::to_string(number));
    }
  }

  const int count_;
  std::mutex mutex_;
  Entries waiting_;
  int next_ = 0;
  bool isRunning_ = false, isWatched_ = false;
};

Order& orderOf(smddp_group* group, int count) {
  static auto* mutex = new std::mutex;
  static auto* orders = new std::map<std::pair<smddp_group*, int>, std::unique_ptr<Order>>;
  const std::lock_guard lock(*mutex);
  auto& order = (*orders)[{group, count}];
  if (!order) order = std::make_unique<Order>(count);
  return *order;
}

// Is this thread TensorFlow's, and begins a collective?
thread_local bool isBeginning = false;

// The collectives of one run of an operation.
struct Run {
  OpKernelContext* context;
  AsyncOpKernel::DoneCallback done;
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
      finish();
    } else {
      // Not here: this is the engine's thread, and TensorFlow may go on with any kernel, which may wait. The queue has
      // a thread for each that waits, and keeps threads, which Env::SchedClosure does not.
      static auto* queue = new tensorflow::UnboundedWorkQueue(context->env(), "smddp");
      queue->Schedule([this] { finish(); });
    }
  }

  void finish() {
    if (!status.ok()) context->SetStatus(status);
    const auto callback = std::move(done);
    delete this;
    callback();
  }
};

struct Begun {
  Run* run;
  smddp_operation* operation;
};

class Collective : public AsyncOpKernel {
 public:
  Collective(OpKernelConstruction* construction, smddp_collective collective)
      : AsyncOpKernel(construction), collective_(collective) {
    int64_t group = 0;
    OP_REQUIRES_OK(construction, construction->GetAttr("group", &group));
    group_ = reinterpret_cast<smddp_group*>(group);
  }

 protected:
  // Begins `arguments`, which keep the tensors.
  void begin(Run* run, smddp_arguments arguments, const Tensor& input, const Tensor& output) {
    if (const absl::Status status = typeOf(input.dtype(), &arguments.type); !status.ok()) {
      run->end(status);
      return;
    }
    arguments.collective = collective_;
    arguments.input = input.data();
    arguments.output = output.data();
    // The engine may write to them after an error.
    auto held = std::make_unique<std::pair<Tensor, Tensor>>(input, output);
    arguments.held = held.release();
    arguments.release = [](void* tensors) {
      delete static_cast<std::pair<Tensor, Tensor>*>(tensors);
    };
    isBeginning = true;
    beginHeld(run, arguments);
    isBeginning = false;
  }

  smddp_group* group() const { return group_; }

 private:
  void beginHeld(Run* run, const smddp_arguments& arguments) {
    smddp_operation* operation = nullptr;
    if (smddp_begin(group_, &arguments, &operation) != SMDDP_OK) {
      run->end(lastError());
      return;
    }
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

  const smddp_collective collective_;
  smddp_group* group_ = nullptr;
};

class AllReduceInOrder : public Collective {
 public:
  explicit AllReduceInOrder(OpKernelConstruction* construction)
      : Collective(construction, SMDDP_ALLREDUCE) {
    OP_REQUIRES_OK(construction, construction->GetAttr("op", &op_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const int inputs = context->num_inputs();
    std::vector<Tensor> outputs(static_cast<size_t>(inputs));
    for (int i = 0; i < inputs; ++i) {
      Tensor* output = nullptr;
      OP_REQUIRES_OK_ASYNC(
          context,
          context->forward_input_or_allocate_output({i}, i, context->input(i).shape(), &output),
          done);
      outputs[static_cast<size_t>(i)] = *output;
    }
    auto* run = new Run{context, std::move(done), static_cast<size_t>(inputs)};
    enter(run, [this, run, outputs = std::move(outputs)] {
      for (size_t i = 0; i < outputs.size(); ++i) {
        smddp_arguments arguments{};
        arguments.count = outputs[i].NumElements();
        arguments.op = static_cast<smddp_op>(op_);
        begin(run, arguments, run->context->input(static_cast<int>(i)), outputs[i]);
      }
    });
  }

 protected:
  // Calls `beginAll`, which begins the collectives of `run`, once it is their turn.
  virtual void enter(Run* /*run*/, std::function<void()> beginAll) { beginAll(); }

 private:
  int op_ = 0;
};

class AllReduce final : public AllReduceInOrder {
 public:
  explicit AllReduce(OpKernelConstruction* construction) : AllReduceInOrder(construction) {
    int count = 0;
    OP_REQUIRES_OK(construction, construction->GetAttr("number", &number_));
    OP_REQUIRES_OK(construction, construction->GetAttr("count", &count));
    OP_REQUIRES_OK(construction, construction->GetAttr("timeout", &timeout_));
    order_ = &orderOf(group(), count);
  }

 private:
  void enter(Run* run, std::function<void()> beginAll) override {
    order_->enter(number_, timeout_, run->context->env(), std::move(beginAll),
                  [run](const std::string& missing) {
                    const auto status = absl::DeadlineExceededError("smddp: allreduce: " + missing);
                    for (size_t left = run->left; left > 0; --left) run->end(status);
                  });
  }

  int number_ = 0;
  float timeout_ = 0;
  Order* order_ = nullptr;
};

class Broadcast final : public Collective {
 public:
  explicit Broadcast(OpKernelConstruction* construction)
      : Collective(construction, SMDDP_BROADCAST) {
    OP_REQUIRES_OK(construction, construction->GetAttr("root", &root_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    smddp_arguments arguments{};
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(
        context,
        context->forward_input_or_allocate_output({0}, 0, context->input(0).shape(), &output),
        done);
    arguments.count = output->NumElements();
    arguments.root = root_;
    begin(new Run{context, std::move(done), 1}, arguments, context->input(0), *output);
  }

 private:
  int root_ = 0;
};

class AllGather final : public Collective {
 public:
  explicit AllGather(OpKernelConstruction* construction)
      : Collective(construction, SMDDP_ALLGATHER) {}

  // A tensor of each rank, of one shape: [ranks, ...].
  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    smddp_arguments arguments{};
    const Tensor& input = context->input(0);
    tensorflow::TensorShape shape = input.shape();
    shape.InsertDim(0, smddp_size(group()));
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, shape, &output), done);
    arguments.count = input.NumElements();
    begin(new Run{context, std::move(done), 1}, arguments, input, *output);
  }
};

#define SMDDP_TYPES                                                                           \
  "{half, bfloat16, float, double, complex64, complex128, int8, int16, int32, int64, uint8, " \
  "uint16, uint32, uint64, bool}"

absl::Status unchangedShapes(tensorflow::shape_inference::InferenceContext* context) {
  for (int i = 0; i < context->num_inputs(); ++i) context->set_output(i, context->input(i));
  return absl::OkStatus();
}

// Sums, or whatever `op` (smddp_op) says, each of the tensors over ranks, in the order of the program: TensorFlow keeps
// the order of stateful operations.
REGISTER_OP("SmddpAllreduceInOrder")
    .Input("tensors: T")
    .Output("results: T")
    .Attr("T: list(" SMDDP_TYPES ") >= 1")
    .Attr("group: int")
    .Attr("op: int")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(unchangedShapes);

// The same, but operations begin in the order of their numbers, 0 to count - 1, once each and then from the beginning.
REGISTER_OP("SmddpAllreduce")
    .Input("tensors: T")
    .Output("results: T")
    .Attr("T: list(" SMDDP_TYPES ") >= 1")
    .Attr("group: int")
    .Attr("op: int")
    .Attr("number: int")
    .Attr("count: int")
    .Attr("timeout: float")
    .SetIsDistributedCommunication()
    .SetShapeFn(unchangedShapes);

REGISTER_OP("SmddpBroadcast")
    .Input("tensor: T")
    .Output("result: T")
    .Attr("T: " SMDDP_TYPES)
    .Attr("group: int")
    .Attr("root: int")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape);

REGISTER_OP("SmddpAllgather")
    .Input("tensor: T")
    .Output("result: T")
    .Attr("T: " SMDDP_TYPES)
    .Attr("group: int")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      tensorflow::shape_inference::ShapeHandle result;
      TF_RETURN_IF_ERROR(
          context->Concatenate(context->Vector(context->UnknownDim()), context->input(0), &result));
      context->set_output(0, result);
      return absl::OkStatus();
    });

REGISTER_KERNEL_BUILDER(Name("SmddpAllreduce").Device(tensorflow::DEVICE_CPU), AllReduce);
REGISTER_KERNEL_BUILDER(Name("SmddpAllreduceInOrder").Device(tensorflow::DEVICE_CPU),
                        AllReduceInOrder);
REGISTER_KERNEL_BUILDER(Name("SmddpBroadcast").Device(tensorflow::DEVICE_CPU), Broadcast);
REGISTER_KERNEL_BUILDER(Name("SmddpAllgather").Device(tensorflow::DEVICE_CPU), AllGather);

}  // namespace
