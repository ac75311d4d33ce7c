// A device for tests on machines without one: torch's PrivateUse1, with threads for streams.
//
// It is asynchronous, as a real device is: copies and fills are queued on the current stream, and memory is freed when
// the stream that allocated it, and those it was recorded on, have come so far. A copy that touches freed memory is
// counted (violations). A test can hold a stream (gate, open), and make copies slow or fail (slow_down, break_copies).
// A stream can be captured and replayed; calls that would end a capture are counted. Operators without a kernel here
// run on the CPU (cpu_fallback).
//
// Other processes can open its memory, by the functions of fake_cuda_part.cc.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "process_group/fake_device.h"

namespace fake_device {

World& world() {
  static auto* it = new World;
  return *it;
}

void Lane::add(std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  if (captures_) {
    graph_.push_back(std::move(task));
    return;
  }
  if (!started_) std::thread([this] { run(); }).detach();
  started_ = true;
  tasks_.push_back(std::move(task));
  ++added_;
  changed_.notify_all();
}

void Lane::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this, until = added_] { return done_ >= until; });
}

void Lane::capture() {
  const std::lock_guard lock(mutex_);
  graph_.clear();
  captures_ = true;
  ++world().captures;
}

void Lane::endCapture() {
  const std::lock_guard lock(mutex_);
  captures_ = false;
  --world().captures;
}

bool Lane::captures() {
  const std::lock_guard lock(mutex_);
  return captures_;
}

void Lane::replay() {
  std::deque<std::function<void()>> tasks;
  {
    const std::lock_guard lock(mutex_);
    tasks = graph_;
  }
  for (const auto& task : tasks) add(task);
}

void Lane::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !tasks_.empty(); });
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

Lane& laneOf(c10::StreamId id) { return world().lanes.at(static_cast<size_t>(id)); }

bool expectLive(const void* data) {
  if (data == nullptr) return true;
  const std::lock_guard lock(world().mutex);
  // Tensors may begin within an allocation.
  const auto after = world().live.upper_bound(data);
  const bool live =
      after != world().live.begin() &&
      data < static_cast<const std::byte*>(std::prev(after)->first) + std::prev(after)->second;
  if (!live) ++world().violations;
  return live;
}

}  // namespace fake_device

namespace {

using namespace fake_device;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr auto kKey = c10::DispatchKey::PrivateUse1;
const c10::Device kDevice(kType, 0);
thread_local c10::StreamId currentStream = 0;

// By any thread: graphs are captured in the mode that checks the calls of all threads.
void mayWaitOrAsk() {
  if (world().captures > 0) ++world().spoilt;
}

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, reached = 0;

  void await(uint64_t version) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return reached >= version; });
  }
};

void record(const std::shared_ptr<Event>& event, c10::StreamId stream) {
  uint64_t version = 0;
  {
    const std::lock_guard lock(event->mutex);
    version = ++event->recorded;
  }
  laneOf(stream).add([event, version] {
    const std::lock_guard lock(event->mutex);
    event->reached = std::max(event->reached, version);
    event->changed.notify_all();
  });
}

void makeWait(c10::StreamId stream, const std::shared_ptr<Event>& event) {
  uint64_t version = 0;
  {
    const std::lock_guard lock(event->mutex);
    version = event->recorded;
  }
  laneOf(stream).add([event, version] { event->await(version); });
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Handle = std::shared_ptr<Event>*;
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream stream(c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, id);
  }
  c10::Stream getStream(c10::Device) const override { return stream(currentStream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream(1 + world().nextPoolStream++ % kPoolStreams);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStreamFromGlobalPool(device, false);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(std::exchange(currentStream, next.id()));
  }
  // So that stream 0 has no null handle.
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return handleOf(stream.id());
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Handle>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new std::shared_ptr<Event>(std::make_shared<Event>());
    ::record(*static_cast<Handle>(*event), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) makeWait(stream.id(), *static_cast<Handle>(event));
  }
  // Not all releases of torch call it.
  bool isStreamCapturing(const c10::Stream& stream) const { return laneOf(stream.id()).captures(); }
  bool queryEvent(void* event) const override {
    mayWaitOrAsk();
    if (event == nullptr) return true;
    Event& it = **static_cast<Handle>(event);
    const std::lock_guard lock(it.mutex);
    return it.reached == it.recorded;
  }
  void synchronizeEvent(void* event) const override {
    mayWaitOrAsk();
    if (event == nullptr) return;
    Event& it = **static_cast<Handle>(event);
    it.await(it.recorded);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return false; }
  void synchronizeStream(const c10::Stream& stream) const override {
    mayWaitOrAsk();
    laneOf(stream.id()).drain();
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    mayWaitOrAsk();
    for (Lane& lane : world().lanes) lane.drain();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    const std::lock_guard lock(world().mutex);
    world().recorded[data.get()].insert(stream.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct DeviceMemory final : c10::Allocator {
  struct Block {
    void* data;
    c10::StreamId stream;
  };
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &nothing, kDevice};
    auto* block = new Block{allocateShared(bytes, true), currentStream};
    return {block->data, block, &free, kDevice};
  }
  static void nothing(void*) {}
  static void free(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    std::set<c10::StreamId> users;
    {
      const std::lock_guard lock(world().mutex);
      if (const auto found = world().recorded.extract(block->data)) users = found.mapped();
    }
    for (const c10::StreamId user : users) {
      const auto done = std::make_shared<Event>();
      record(done, user);
      makeWait(block->stream, done);
    }
    laneOf(block->stream).add([data = block->data] { freeShared(data); });
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
DeviceMemory deviceMemory;
REGISTER_ALLOCATOR(kType, &deviceMemory);

struct PinnedMemory final : c10::Allocator {
  static std::set<const void*>& blocks() {
    static auto* all = new std::set<const void*>;
    return *all;
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::malloc(std::max<size_t>(bytes, 1));
    const std::lock_guard lock(world().mutex);
    blocks().insert(data);
    return {data, data, &free, c10::DeviceType::CPU};
  }
  static void free(void* data) {
    const std::lock_guard lock(world().mutex);
    blocks().erase(data);
    std::free(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
PinnedMemory pinnedMemory;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinnedMemory; }
  bool isPinnedPtr(const void* data) const override {
    const std::lock_guard lock(world().mutex);
    return PinnedMemory::blocks().contains(data);
  }
};

// A CPU tensor with the same memory, for the thread of a stream.
at::Tensor onHost(const at::Tensor& tensor) {
  at::Tensor view = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                                  tensor.options().device(c10::kCPU).pinned_memory(false));
  if (tensor.is_conj()) view = view.conj();
  if (tensor.is_neg()) view = view._neg_view();
  return view;
}

at::Tensor copyFrom(const at::Tensor& from, const at::Tensor& to, bool nonBlocking) {
  if (from.numel() == 0) return to;
  TORCH_CHECK(!world().copiesFail, "the device is broken");
  std::vector<const void*> device;
  // As torch's allocator of pinned memory does: memory is not used again before its copy has ended.
  std::vector<c10::Storage> pinned;
  bool blocks = !nonBlocking;
  if (from.device() == kDevice && to.is_pinned()) {
    world().fetched += static_cast<int64_t>(from.nbytes());
  }
  for (const at::Tensor& tensor : {from, to}) {
    if (tensor.device() == kDevice) {
      device.push_back(tensor.storage().data_ptr().get());
    } else if (tensor.is_pinned()) {
      pinned.push_back(tensor.storage());
    } else {
      blocks = true;
    }
  }
  laneOf(currentStream).add([device, pinned, source = onHost(from), target = onHost(to)] {
    const at::NoGradGuard noGrad;
    std::this_thread::sleep_for(std::chrono::milliseconds(world().slowness));
    if (std::all_of(device.begin(), device.end(), expectLive)) target.copy_(source);
  });
  if (blocks) {
    mayWaitOrAsk();
    laneOf(currentStream).drain();
  }
  return to;
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> type,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &deviceMemory, c10::DispatchKeySet(kKey),
                                   c10::dtype_or_default(type), format);
}

at::Tensor emptyStrided(c10::IntArrayRef size, c10::IntArrayRef stride,
                        std::optional<at::ScalarType> type, std::optional<at::Layout>,
                        std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &deviceMemory, c10::DispatchKeySet(kKey),
                                           c10::dtype_or_default(type));
}

at::Tensor copyFromAndResize(const at::Tensor& from, const at::Tensor& to) {
  return copyFrom(from, to.resize_(from.sizes()), false);
}

using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

std::optional<at::Tensor> onCpu(const std::optional<at::Tensor>& tensor) {
  return tensor && tensor->defined() ? tensor->cpu() : std::optional<at::Tensor>();
}

// torch has no fallback for convolutions.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef outputPadding, int64_t groups) {
  return at::convolution(input.cpu(), weight.cpu(), onCpu(bias), stride, padding, dilation,
                         transposed, outputPadding, groups)
      .to(kDevice);
}

Three convolutionBackward(const at::Tensor& gradient, const at::Tensor& input,
                          const at::Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding,
                          at::IntArrayRef dilation, bool transposed, at::IntArrayRef outputPadding,
                          int64_t groups, std::array<bool, 3> mask) {
  const int64_t ofBias[] = {gradient.size(1)};
  const auto [one, two, three] =
      at::convolution_backward(gradient.cpu(), input.cpu(), weight.cpu(), at::IntArrayRef(ofBias),
                               stride, padding, dilation, transposed, outputPadding, groups, mask);
  const auto there = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(kDevice) : tensor;
  };
  return {there(one), there(two), there(three)};
}

// The fallback would lose the statistics, which the schema does not call outputs.
Three batchNorm(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& mean,
                const std::optional<at::Tensor>& variance, bool training, double momentum,
                double eps) {
  const auto ours = onCpu(mean), spread = onCpu(variance);
  const auto [one, two, three] = at::native_batch_norm(input.cpu(), onCpu(weight), onCpu(bias),
                                                       ours, spread, training, momentum, eps);
  if (training && ours) mean->copy_(*ours);
  if (training && spread) variance->copy_(*spread);
  return {one.to(kDevice), two.to(kDevice), three.to(kDevice)};
}

// On such a device torch computes the cell of an LSTM by these functions only.
Three lstmCell(const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& cell,
               const std::optional<at::Tensor>& one, const std::optional<at::Tensor>& other) {
  at::Tensor sum = input + hidden;
  for (const auto& bias : {one, other}) {
    if (bias && bias->defined()) sum = sum + *bias;
  }
  const auto gates = sum.chunk(4, 1);
  const at::Tensor i = gates[0].sigmoid(), f = gates[1].sigmoid();
  const at::Tensor g = gates[2].tanh(), o = gates[3].sigmoid();
  const at::Tensor next = f * cell + i * g;
  return {o * next.tanh(), next, at::cat({i, f, g, o}, 1)};
}

Three lstmCellBackward(const std::optional<at::Tensor>& ofHidden,
                       const std::optional<at::Tensor>& ofNext, const at::Tensor& cell,
                       const at::Tensor& next, const at::Tensor& gates, bool hasBias) {
  const auto parts = gates.chunk(4, 1);
  const at::Tensor &i = parts[0], &f = parts[1], &g = parts[2], &o = parts[3];
  at::Tensor sum = ofNext && ofNext->defined() ? *ofNext : at::zeros_like(next);
  at::Tensor ofOutput = at::zeros_like(o);
  if (ofHidden && ofHidden->defined()) {
    const at::Tensor tanh = next.tanh();
    sum = sum + *ofHidden * o * (1 - tanh * tanh);
    ofOutput = *ofHidden * tanh * o * (1 - o);
  }
  const at::Tensor all = at::cat(
      {sum * g * i * (1 - i), sum * cell * f * (1 - f), sum * i * (1 - g * g), ofOutput}, 1);
  return {all, sum * f, hasBias ? all.sum(0) : at::Tensor()};
}

void onTheCpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", emptyStrided);
  m.impl("_copy_from", copyFrom);
  m.impl("_copy_from_and_resize", copyFromAndResize);
  m.impl("native_batch_norm", batchNorm);
  m.impl("_thnn_fused_lstm_cell", lstmCell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstmCellBackward);
  m.impl("resize_", at::native::resize_);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolutionBackward);
  m.impl("view", at::native::view);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", at::native::_reshape_alias);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&onTheCpu>());
}

}  // namespace

c10::StreamId fake_device::currentStreamId() { return currentStream; }

PYBIND11_MODULE(fake_device, m) {
  using Release = pybind11::call_guard<pybind11::gil_scoped_release>;
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("gate", [] {
    World& it = world();
    {
      const std::lock_guard lock(it.mutex);
      it.gated = true;
    }
    laneOf(currentStream).add([&it] {
      std::unique_lock lock(it.mutex);
      it.changed.wait(lock, [&it] { return !it.gated; });
    });
  });
  m.def("open", [] {
    const std::lock_guard lock(world().mutex);
    world().gated = false;
    world().changed.notify_all();
  });
  // A kernel, which runs when the stream comes to it.
  m.def("fill", [](const at::Tensor& tensor, double value) {
    laneOf(currentStream)
        .add([data = tensor.storage().data_ptr().get(), view = onHost(tensor), value] {
          if (expectLive(data)) view.fill_(value);
        });
  });
  m.def("violations", [] {
    const std::lock_guard lock(world().mutex);
    return world().violations;
  });
  m.def("slow_down", [](int milliseconds) { world().slowness = milliseconds; });
  m.def("share_memory", [](bool share) { world().sharesMemory = share; });
  m.def("share_tensors", [](bool share) { world().sharesTensors = share; });
  // Of larger allocations it describes a part, as a driver may if memory was mapped in parts.
  m.def("tell_of_parts", [](size_t bytes) { world().rangeBytes = bytes; });
  m.def("jobs", [] { return world().jobs.load(); });
  m.def("fetched", [] { return world().fetched.load(); });
  // Captures the current stream into its only graph.
  m.def("capture", [] { laneOf(currentStream).capture(); });
  m.def("end_capture", [] { laneOf(currentStream).endCapture(); });
  m.def("replay", [] { laneOf(currentStream).replay(); });
  m.def("spoilt", [] { return world().spoilt.load(); });
  bindRecordingNccl(m);
  bindHangingNccl(m);
  m.def("break_copies", [] { world().copiesFail = true; });
  m.def(
      "synchronize", [] { Guard().synchronizeDevice(0); }, Release());
}
