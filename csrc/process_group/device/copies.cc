#include "process_group/device/copies.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "common/log.h"
#include "cuda/capture.h"

namespace smddp::process_group::device {
namespace {

constexpr int kYields = 200;
constexpr std::chrono::microseconds kNap{20};

c10::impl::VirtualGuardImpl guardOf(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

// The host takes part in every call. When a graph is replayed it does not.
c10::Device notCapturing(c10::Device device) {
  if (isCapturing(device)) {
    C10_THROW_ERROR(NotImplementedError,
                    "smddp: this call cannot be captured into a CUDA graph: only calls that go to "
                    "NCCL can. Make it outside of the graph, or give each rank a GPU of its own");
  }
  return device;
}

// Not all releases of torch have is_capturing().
template <typename Stream>
bool saysItCaptures(const Stream& stream) {
  if constexpr (requires { stream.is_capturing(); }) return stream.is_capturing();
  return false;
}

}  // namespace

c10::Stream currentStream(c10::Device device) { return guardOf(device).getStream(device); }

bool isCapturing(c10::Device device) {
  const c10::Stream stream = currentStream(device);
  // torch throws for the default stream while another one is captured; CUDA's driver answers.
  return device.is_cuda() ? cuda::isCapturing(stream.native_handle()) : saysItCaptures(stream);
}

DeviceCopies::DeviceCopies(c10::Device device, CallMemoryPtr memory)
    : stream_(
          guardOf(notCapturing(device)).getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
      arrival_(c10::Event(device.type())),
      end_(c10::Event(device.type())),
      memory_(std::move(memory)) {
  c10::Event now(device.type());
  now.record(currentStream(device));
  now.block(stream_);
}

DeviceCopies::~DeviceCopies() {
  try {
    // Without the guard, a thread that has no device yet would get a context on the first one when the events end.
    const c10::DeviceGuard guard(device());
    letGo();
    arrival_.reset();
    end_.reset();
  } catch (const std::exception& error) {
    SMDDP_LOG(Debug, "process_group", "while a call ended: {}", error.what());
  }
}

at::Tensor DeviceCopies::pinnedLike(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), at::TensorOptions(tensor.dtype()).pinned_memory(true));
}

void DeviceCopies::fetch(const at::Tensor& from, const at::Tensor& into) {
  const c10::StreamGuard guard(stream_);
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  // A copy cannot resolve these on the way, so the device does it before.
  const at::Tensor plain = from.resolve_conj().resolve_neg().contiguous();
  into.view(-1).copy_(plain.view(-1), /*non_blocking=*/true);
  awaitsStream_ = true;
  if (!plain.is_same(from)) memory_->add(plain);
}

void DeviceCopies::seal() {
  if (awaitsStream_) arrival_->record(stream_);
}

bool DeviceCopies::arrived() const {
  if (!awaitsStream_) return true;
  const bool now = arrival_->query();
  arrived_.store(now, std::memory_order_relaxed);
  return now;
}

bool DeviceCopies::awaitArrival(Deadline deadline) const {
  const MonotonicClock clock;
  for (int looks = 0; !arrived(); ++looks) {
    if (deadline.passed(clock)) return false;
    if (looks < kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kNap);
    }
  }
  return true;
}

void DeviceCopies::putBack(const at::Tensor& into, const at::Tensor& from) {
  const c10::StreamGuard guard(stream_);
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  into.copy_(from, /*non_blocking=*/true);
  use(into);
}

void DeviceCopies::use(const at::Tensor& tensor) const {
  // Another stream allocated the memory. Once it is freed, torch must not use it again before this stream is done.
  guardOf(device()).recordDataPtrOnStream(tensor.storage().data_ptr(), stream_);
}

void DeviceCopies::mark() {
  arrival_->record(stream_);
  awaitsStream_ = true;
}

void DeviceCopies::letGo() {
  const CallMemoryPtr memory = std::move(memory_);
  if (!memory || !awaitsStream_ || arrived_.load(std::memory_order_relaxed)) return;
  const auto useAll = [this](at::TensorList tensors) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.device() == device()) use(tensor);
    }
  };
  useAll(memory->inputs);
  for (const auto& list : memory->outputs) useAll(list);
  useAll(memory->staged);
}

void DeviceCopies::finish() {
  letGo();
  end_->record(stream_);
  finished_.store(true, std::memory_order_release);
}

void DeviceCopies::makeStreamWait() const { makeStreamWait(currentStream(device())); }

void DeviceCopies::makeStreamWait(c10::Stream stream) const { end_->block(stream); }

}  // namespace smddp::process_group::device
