// Which calls NCCL gets, and how the ranks agree on that. The calls themselves are in gpu_calls.cc.
#include "process_group/device/gpu_process_group.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <set>
#include <tuple>
#include <type_traits>

#include "common/config.h"
#include "common/log.h"
#include "engine/split.h"
#include "process_group/checks.h"
#include "process_group/device/sources.h"
#include "process_group/errors.h"
#include "process_group/store_adapter.h"

namespace smddp::process_group::device {
namespace {

using c10::intrusive_ptr;

// Whether NCCL moves a type, by torch's name. Other types go through the host.
bool moves(at::ScalarType type) {
  switch (type) {
    case at::kByte:
    case at::kChar:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
    case at::kBool: return true;
    default: return false;
  }
}

// Whether NCCL also sums it. Averages of integers and scaled sums of bfloat16 differ between versions of NCCL.
bool reduces(at::ScalarType type, const c10d::ReduceOp& op) {
  if (!moves(type)) return false;
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::PRODUCT:
    case c10d::ReduceOp::MIN:
    case c10d::ReduceOp::MAX: return true;
    case c10d::ReduceOp::AVG: return at::isFloatingType(type);
    case c10d::ReduceOp::PREMUL_SUM: return at::isFloatingType(type) && type != at::kBFloat16;
    default: return false;
  }
}

// On rails NCCL makes only a part of the sum. It sums bools as numbers, and so cannot make a part of a sum of bools.
bool reducesOnRails(at::ScalarType type, ReduceOp op) {
  if (type == at::kBool || !moves(type)) return false;
  switch (op) {
    case ReduceOp::SUM:
    case ReduceOp::PRODUCT:
    case ReduceOp::MIN:
    case ReduceOp::MAX: return true;
    case ReduceOp::AVG: return at::isFloatingType(type);
    default: return false;
  }
}

std::string keyOf(uint64_t group, int rank) {
  return fmt::format("smddp/gpu/{:x}/{}", group, rank);
}

// Warns once in a process that calls go through the host, and why.
void announce(int rank, const cuda::Choice& choice) {
  SMDDP_LOG(Info, "process_group", "calls on GPU tensors: {} ({})", cuda::toString(choice.path),
            choice.reason);
  static std::mutex mutex;
  static auto* const said = new std::set<std::string>;
  const std::lock_guard lock(mutex);
  if (rank == 0 && choice.path == cuda::Path::Host && said->insert(choice.reason).second) {
    SMDDP_LOG(Warn, "process_group", "calls on GPU tensors go through memory of the host: {}",
              choice.reason);
  }
}

// Warns once in a process that a call goes through the host although another way serves its group.
void announceHost(int rank, cuda::Path path, collectives::Collective collective,
                  const at::Tensor& tensor, ReduceOp op) {
  if (rank != 0) return;
  const std::tuple kind{collective, tensor.scalar_type(), op};
  static std::mutex mutex;
  static auto* const said = new std::set<std::decay_t<decltype(kind)>>;
  const std::lock_guard lock(mutex);
  if (said->contains(kind)) return;
  std::string call = fmt::format("{} of {}", collectives::toString(collective),
                                 c10::toString(tensor.scalar_type()));
  if (collectives::isReduction(collective)) {
    call += fmt::format(" by {}", toString(op));
  }
  said->insert(kind);
  SMDDP_LOG(
      Warn, "process_group",
      "{} of GPU tensors goes through memory of the host: the way of other calls of its group, "
      "{}, does not serve it",
      call, cuda::toString(path));
}

// The first call does what is done only once; a graph would do it again.
void requireNoCapture(c10::Device device) {
  if (!isCapturing(device)) return;
  C10_THROW_ERROR(NotImplementedError,
                  "smddp: the first call of a group on GPU tensors cannot be captured into a CUDA "
                  "graph: the ranks have yet to choose the way of such calls, and NCCL has to "
                  "connect them. Make one, with the same ranks, before the graph is captured");
}

// The groups in which this thread is coalescing, and whether it is in the group of NCCL, too.
std::map<const GpuProcessGroup*, bool>& coalescing() {
  thread_local std::map<const GpuProcessGroup*, bool> groups;
  return groups;
}

}  // namespace

GpuProcessGroup::GpuProcessGroup(const Creation& creation, GpuSupport support)
    : ProcessGroup(creation, std::make_unique<Calls>(this)),
      store_(creation.store),
      support_(std::move(support)) {
  sendDirectly(static_cast<Calls&>(devices()));
}

GpuProcessGroup::GpuProcessGroup(std::shared_ptr<engine::groups::Group> group,
                                 std::chrono::milliseconds timeout,
                                 const intrusive_ptr<c10d::Store>& store, GpuSupport support)
    : ProcessGroup(std::move(group), timeout, std::make_unique<Calls>(this)),
      store_(store),
      support_(std::move(support)) {
  sendDirectly(static_cast<Calls&>(devices()));
}

// A group on one node does not use the network.
void GpuProcessGroup::sendDirectly(Calls& calls) const {
  if (!settings().gpuDirect || group()->membership.topology.numNodes() == 1) return;
  calls.sendFrom(DeviceSources::shared(support_.library));
}

GpuProcessGroup::~GpuProcessGroup() {
  try {
    // Nobody has called shutdown(). What NCCL has enqueued may never end, so it is aborted instead of waited for.
    if (auto* nccl = nccl_.load(); nccl != nullptr && !isEnding()) nccl->abort();
    if (rails_ && !isEnding()) rails_->abandon();
    leave();
  } catch (const std::exception& error) {
    SMDDP_LOG(Debug, "process_group", "while the group ended: {}", error.what());
  }
}

void GpuProcessGroup::setTimeout(std::chrono::milliseconds timeout) {
  ProcessGroup::setTimeout(timeout);
  if (auto* nccl = nccl_.load()) nccl->backend().setTimeout(timeout);
}

void GpuProcessGroup::abortBecause(const std::string& reason) {
  // The engine's group first: so all ranks get the error that names this rank.
  ProcessGroup::abortBecause(reason);
  if (auto* nccl = nccl_.load()) nccl->abort();
  if (state_.load(std::memory_order_acquire) == State::Rails) rails_->abort();
}

void GpuProcessGroup::shutdown() {
  // The base refuses calls that come after this.
  if (auto* nccl = nccl_.load(); nccl != nullptr && !isEnding()) nccl->shutdown();
  if (state_.load(std::memory_order_acquire) == State::Rails && !isEnding()) rails_->shutdown();
  ProcessGroup::shutdown();
}

std::string GpuProcessGroup::path() const {
  switch (state_.load()) {
    case State::Host: return "host";
    case State::Nccl: return "nccl";
    case State::Ipc: return "ipc";
    case State::Rails: return "rails";
    case State::Unknown: break;
  }
  return "";
}

intrusive_ptr<c10d::Backend> GpuProcessGroup::split(
    const intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const intrusive_ptr<c10d::Backend::Options>& options) {
  const auto [group, timeout] = splitEngineGroup(store, ranks, options);
  if (!group) return nullptr;
  auto child = c10::make_intrusive<GpuProcessGroup>(group, timeout, store, support_);
  child->parentsDevice_ = boundDevice();
  child->becomePartOf(*this, ranks, store);
  return child;
}

std::optional<c10::Device> GpuProcessGroup::boundDevice() const {
  const auto bound = getBoundDeviceId();
  return bound ? bound : parentsDevice_;
}

bool GpuProcessGroup::supportsTensorAlloc(c10::DeviceIndex device) {
  if (device < 0) return ProcessGroup::supportsTensorAlloc(device);
  if (!settings().gpuCommMemory) return false;
  switch (state_.load(std::memory_order_acquire)) {
    case State::Nccl: return nccl_.load()->backend().supportsTensorAlloc(device);
    case State::Ipc: return true;
    case State::Rails:
    case State::Host:
    case State::Unknown: break;
  }
  return false;
}

at::Tensor GpuProcessGroup::allocateTensor(long size, at::TensorOptions options) {
  const State state = state_.load(std::memory_order_acquire);
  if (options.device().type() == support_.type && settings().gpuCommMemory) {
    if (state == State::Nccl) return nccl_.load()->backend().allocateTensor(size, options);
    if (state == State::Ipc) return translated([&] { return memory_->allocate(size, options); });
  }
  return ProcessGroup::allocateTensor(size, options);
}

// --- the way that a call takes -----------------------------------------------------------------------------

bool GpuProcessGroup::isOnGpu(const at::Tensor& tensor) const {
  return tensor.defined() && tensor.device().type() == support_.type &&
         tensor.layout() == c10::kStrided;
}

NcclGroup* GpuProcessGroup::used(State state) {
  if (state != State::Nccl) return nullptr;
  auto* nccl = nccl_.load(std::memory_order_acquire);
  auto& groups = coalescing();
  if (groups.empty()) return nccl;
  if (const auto found = groups.find(this); found != groups.end() && !found->second) {
    nccl->backend().startCoalescing();
    found->second = true;
  }
  return nccl;
}

// `serves`: NCCL does such a call.
NcclGroup* GpuProcessGroup::ncclFor(const at::Tensor& tensor, std::chrono::milliseconds timeout,
                                    bool serves) {
  if (!isOnGpu(tensor)) return nullptr;
  State state = state_.load(std::memory_order_acquire);
  if (state == State::Unknown) {
    static_cast<void>(group());  // refuses a group that has been destroyed
    requireNoCapture(tensor.device());
    const std::lock_guard lock(mutex_);
    translated([&] {
      publish(tensor.device());
      state = decide(timeout);
    });
  }
  if (!serves) return nullptr;
  if (state == State::Nccl && !ncclHasServed_.load(std::memory_order_relaxed)) {
    requireNoCapture(tensor.device());
    ncclHasServed_.store(true, std::memory_order_relaxed);
  }
  return used(state);
}

NcclGroup* GpuProcessGroup::ncclFor(const at::Tensor& tensor, std::chrono::milliseconds timeout) {
  return ncclFor(tensor, timeout, moves(tensor.scalar_type()));
}

NcclGroup* GpuProcessGroup::ncclFor(const Tensors& tensors, std::chrono::milliseconds timeout) {
  return tensors.empty() ? nullptr : ncclFor(tensors.front(), timeout);
}

NcclGroup* GpuProcessGroup::reducingNcclFor(const at::Tensor& tensor, const c10d::ReduceOp& op,
                                            std::chrono::milliseconds timeout) {
  return ncclFor(tensor, timeout, reduces(tensor.scalar_type(), op));
}

NcclGroup* GpuProcessGroup::reducingNcclFor(const Tensors& tensors, const c10d::ReduceOp& op,
                                            std::chrono::milliseconds timeout) {
  return tensors.empty() ? nullptr : reducingNcclFor(tensors.front(), op, timeout);
}

NcclGroup* GpuProcessGroup::messageNcclFor(const Tensors& tensors, int rank) {
  if (tensors.size() != 1 || !isOnGpu(tensors.front())) return nullptr;
  if (!moves(tensors.front().scalar_type())) return nullptr;
  // The base refuses ranks that do not exist. What a rank sends itself needs no network.
  if (rank < 0 || rank >= getSize() || rank == getRank()) return nullptr;
  static_cast<void>(group());
  State state = State::Unknown;
  {
    const std::lock_guard lock(mutex_);
    if (!messages_.contains(rank)) requireNoCapture(tensors.front().device());
    translated([&] {
      publish(tensors.front().device());
      state = decideFor(rank);
    });
  }
  return used(state);
}

bool GpuProcessGroup::serves(collectives::Collective collective, const at::Tensor& tensor,
                             ReduceOp op) const {
  if (!isOnGpu(tensor)) return false;
  switch (state_.load(std::memory_order_acquire)) {
    case State::Ipc: return true;
    case State::Rails:
      if (GpuRails::serves(collective) &&
          (!collectives::isReduction(collective) || reducesOnRails(tensor.scalar_type(), op))) {
        return true;
      }
      announceHost(getRank(), cuda::Path::Rails, collective, tensor, op);
      return false;
    case State::Nccl: announceHost(getRank(), cuda::Path::Nccl, collective, tensor, op); break;
    case State::Host:
    case State::Unknown: break;
  }
  return false;
}

std::shared_ptr<DeviceTurns> GpuProcessGroup::begin(const engine::calls::Request& request,
                                                    const std::shared_ptr<DeviceCopies>& copies,
                                                    CallMemoryPtr memory) {
  if (rails_) return rails_->begin(request, copies, std::move(memory));
  return memory_->begin(request, copies, std::move(memory));
}

// The ranks share a GPU. They find out together whether they can share its memory.
cuda::Choice GpuProcessGroup::connect(std::chrono::milliseconds timeout) {
  // So that all ranks come to it after the same calls.
  devices().drain();
  memory_ = std::make_shared<GpuMemoryPath>(engine(), group(), *device_, support_.library);
  const std::string refusal = memory_->connect(effectiveTimeout(timeout));
  if (refusal.empty()) return {cuda::Path::Ipc, "SMDDP_GPU_PATH=ipc"};
  memory_.reset();
  return {cuda::Path::Host, "SMDDP_GPU_PATH=ipc is not possible: " + refusal};
}

GpuProcessGroup::State GpuProcessGroup::decide(std::chrono::milliseconds timeout) {
  if (const State known = state_.load(); known != State::Unknown) return known;
  std::vector<int> all(static_cast<size_t>(getSize()));
  for (int rank = 0; rank < getSize(); ++rank) all[static_cast<size_t>(rank)] = rank;
  auto choice = cuda::choosePath(settings().gpuPath, static_cast<bool>(support_.makeNccl),
                                 placesOf(all, effectiveTimeout(timeout)));
  if (choice.path == cuda::Path::Ipc) choice = connect(timeout);
  announce(getRank(), choice);
  if (choice.path == cuda::Path::Nccl) makeNccl();
  if (choice.path == cuda::Path::Rails) makeRails(timeout);
  state_.store(stateOf(choice.path), std::memory_order_release);
  return stateOf(choice.path);
}

// Depends on these two ranks only. So sender and receiver decide alike, whatever they know of the others.
GpuProcessGroup::State GpuProcessGroup::decideFor(int rank) {
  if (const auto known = messages_.find(rank); known != messages_.end()) return known->second;
  // A batch of NCCL's messages connects all ranks of a group, so NCCL must be allowed to serve the whole group.
  const bool may = group()->membership.topology.numNodes() == 1 ||
                   cuda::decidesAlone(settings().gpuPath, static_cast<bool>(support_.makeNccl));
  auto path = cuda::Path::Host;
  if (may) {
    const auto places = placesOf({getRank(), rank}, effectiveTimeout(c10d::kUnsetTimeout));
    path = cuda::choosePath(settings().gpuPath, static_cast<bool>(support_.makeNccl), places).path;
  }
  if (path == cuda::Path::Nccl) {
    makeNccl();
  } else {
    announce(getRank(),
             {cuda::Path::Host,
              "messages between ranks that share a GPU, or in a group on several nodes"});
  }
  return messages_[rank] = stateOf(path);
}

std::vector<cuda::Place> GpuProcessGroup::placesOf(const std::vector<int>& ranks,
                                                   Nanoseconds timeout) {
  const auto& topology = group()->membership.topology;
  std::vector<cuda::Place> places;
  for (const int rank : ranks) places.push_back({topology.nodeOf(static_cast<Rank>(rank)), ""});
  const bool severalNodes = std::any_of(places.begin(), places.end(), [&](const auto& place) {
    return place.node != places.front().node;
  });
  // In these cases the choice does not depend on which GPUs the ranks use.
  if ((severalNodes && settings().gpuPath != "rails") ||
      cuda::decidesAlone(settings().gpuPath, static_cast<bool>(support_.makeNccl))) {
    return places;
  }
  StoreAdapter store(store_, timeout);
  for (size_t i = 0; i < ranks.size(); ++i) {
    const int rank = ranks[i];
    if (!names_.contains(rank)) {
      try {
        const auto bytes = store.get(keyOf(group()->membership.group, rank), timeout);
        const auto* first = reinterpret_cast<const char*>(bytes.data());
        names_[rank] = std::string(first, bytes.size());
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::Timeout) throw;
        raise(ErrorKind::Timeout,
              "rank {} of group \"{}\" has made no call on GPU tensors in {} ms; the first one "
              "needs to know everybody's GPU",
              group()->membership.jobRank(rank), group()->spec.name, timeout / 1'000'000);
      }
    }
    places[i].device = names_[rank];
  }
  return places;
}

void GpuProcessGroup::eagerConnectSingleDevice(c10::Device device) {
  if (device.type() != support_.type) return;
  const std::lock_guard lock(mutex_);
  translated([&] { publish(device); });
}

void GpuProcessGroup::publish(c10::Device device) {
  // The way is chosen once, and depends on the GPU that the others were told.
  const auto bound = boundDevice();
  TORCH_CHECK_VALUE(!bound || *bound == device, "smddp: this group is bound to ", *bound,
                    " by init_process_group(device_id=...), and got a tensor on ", device);
  if (device_) return;
  if (!cuda::decidesAlone(settings().gpuPath, static_cast<bool>(support_.makeNccl))) {
    const std::string name = support_.nameOf(device.index());
    const auto* first = reinterpret_cast<const std::byte*>(name.data());
    StoreAdapter(store_, effectiveTimeout(c10d::kUnsetTimeout))
        .set(keyOf(group()->membership.group, getRank()), {first, first + name.size()});
  }
  device_ = device;
}

void GpuProcessGroup::makeNccl() {
  if (made_) return;
  const auto store = c10::make_intrusive<c10d::PrefixStore>(
      fmt::format("smddp/nccl/{:x}", group()->membership.group), store_);
  auto backend =
      support_.makeNccl(store, getRank(), getSize(),
                        std::chrono::duration_cast<std::chrono::milliseconds>(
                            std::chrono::nanoseconds(effectiveTimeout(c10d::kUnsetTimeout))));
  backend->setBoundDeviceId(boundDevice());
  made_ = NcclGroup::make(engine(), group(), std::move(backend));
  nccl_.store(made_.get(), std::memory_order_release);
}

void GpuProcessGroup::makeRails(std::chrono::milliseconds timeout) {
  if (getRank() == 0 && environment("CUDA_DEVICE_MAX_CONNECTIONS") == "1") {
    SMDDP_LOG(Warn, "process_group",
              "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one queue, where the two groups "
              "of NCCL of SMDDP_GPU_PATH=rails may wait for each other; unset one of the two");
  }
  // So that all ranks come to it after the same calls.
  devices().drain();
  const auto& topology = group()->membership.topology;
  const auto patience = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::nanoseconds(effectiveTimeout(timeout)));
  std::vector<Rank> members;
  for (int node = 0; node < topology.numNodes(); ++node) members.push_back(topology.railPeer(node));
  const engine::groups::GroupSpec spec{
      fmt::format("{}, rail {}", group()->spec.name, topology.myLocal()), topology.myNode(),
      topology.numNodes(), group()->spec.options};
  const auto railGroup =
      engine::splitGroup(*engine(), group(), spec, members, effectiveTimeout(timeout));
  auto calls = std::make_unique<Calls>();
  sendDirectly(*calls);
  auto rail = c10::make_intrusive<ProcessGroup>(railGroup, patience, std::move(calls));
  // The rail fails before NCCL is aborted: an aborted call leaves garbage, which must not be summed.
  const auto failRail = [engine = engine(), railGroup](const Error& error) {
    engine->fail(*railGroup, error);
  };
  const auto nodeGroup = [&](const char* purpose) {
    const std::string prefix =
        fmt::format("smddp/nccl/{:x}/{}/{}", group()->membership.group, purpose, topology.myNode());
    return NcclGroup::make(engine(), group(),
                           support_.makeNccl(c10::make_intrusive<c10d::PrefixStore>(prefix, store_),
                                             topology.myLocal(), topology.teamSize(), patience),
                           failRail);
  };
  rails_ = std::make_shared<GpuRails>(
      engine(), group(), *device_,
      GpuRails::Groups{nodeGroup("scatter"), nodeGroup("gather"), std::move(rail), railGroup});
  rails_->connect();
}

// --- batches ----------------------------------------------------------------------------------------------

void GpuProcessGroup::startCoalescing() {
  ProcessGroup::startCoalescing();
  coalescing()[this] = false;
}

GpuProcessGroup::WorkPtr GpuProcessGroup::endCoalescing() {
  const auto entry = coalescing().extract(this);
  auto ours = ProcessGroup::endCoalescing();
  if (entry.empty() || !entry.mapped()) return ours;
  auto theirs = nccl_.load()->call([](auto& nccl) { return nccl.endCoalescing(); });
  if (!static_cast<Work*>(ours.get())->completions().empty()) {
    ours->wait();
    SMDDP_LOG(Debug, "process_group", "a batch of calls was divided between NCCL and the host");
  }
  return theirs;
}

}  // namespace smddp::process_group::device
