// Endpoint: how it is opened. The rest is in endpoint.cc.
#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "common/error.h"
#include "common/log.h"
#include "common/random.h"
#include "transport/fabric/endpoint.h"
#include "transport/fabric/wire.h"

namespace smddp::transport::fabric {
namespace {

constexpr size_t kMaxSends = 256;
constexpr size_t kSmallReceives = 256;
constexpr size_t kLargeReceives = 64;  // 4 MiB in all
constexpr size_t kLargeMessageBytes = 64 * 1024;
constexpr size_t kSmallMessageBytes = sizeof(FabricControlHeader) + kMaxControlBytes;
// Remote writes complete here without a posted receive, so the peers determine how many entries are used.
constexpr size_t kQueueEntries = 12288;

// Options of headers after 1.17, by value. So a build with an old header can set them in a newer library. A library
// that does not know them refuses, which does no harm.
constexpr int kOptCudaApiPermitted = 10;
constexpr int kOptSharedMemoryPermitted = 11;
constexpr int kOptEfaRnrRetry = -(0xefa << 16);
constexpr int kOptEfaEmulatedWrite = kOptEfaRnrRetry + 2;

size_t roundUp(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

Endpoint::Endpoint(const fi_info& raw, ProviderInfo chosen, const Options& options)
    : provider_(std::move(chosen)), info_(library().dupInfo(&raw)) {
  if (!info_) raise(ErrorKind::Resource, "fi_dupinfo: out of memory");
  fabric_ = createFabric(*info_);
  domain_ = createDomain(*fabric_, *info_);
  addresses_ = createAddressVector(*domain_);
  openQueue();
  openEndpoint(options);
  // Nobody can guess a random key.
  const uint64_t firstKey = provider_.mrKeyBytes == sizeof(uint64_t) ? randomNumber() : 1;
  registry_.emplace(*domain_, endpoint_.get(), provider_.mrMode, protocol_ == Protocol::Write,
                    firstKey);
  bounces_.emplace(*registry_);
  createOperations();
  postReceives();
}

void Endpoint::openQueue() {
  for (const fi_wait_obj wait : {FI_WAIT_FD, FI_WAIT_NONE}) {
    if (wait == FI_WAIT_FD && provider_.quirks.needsPolling) continue;
    for (const size_t size : {kQueueEntries, size_t{0}}) {
      queue_ = tryCreateCompletionQueue(*domain_, size, wait);
      if (!queue_) continue;
      if (wait == FI_WAIT_FD) openEdge();
      return;
    }
  }
  raise(ErrorKind::Transport, "provider {} gives no completion queue", provider_.provider);
}

void Endpoint::openEdge() {
  int descriptor = -1;
  if (fi_control(&queue_->fid, FI_GETWAIT, &descriptor) != 0) return;
  FileDescriptor edge(::epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  // If this fails, the caller polls from time to time, as with providers that have no descriptor.
  if (edge && ::epoll_ctl(edge.get(), EPOLL_CTL_ADD, descriptor, &event) == 0)
    edge_ = std::move(edge);
}

void Endpoint::openEndpoint(const Options& options) {
  endpoint_ = createEndpoint(*domain_, *info_);
  fid* const fid = &endpoint_->fid;
  // We have our own shared memory inside a node. The provider must not call CUDA: then either the network card reads
  // the GPU's memory, or the provider cannot send it.
  const bool no = false;
  fi_setopt(fid, FI_OPT_ENDPOINT, kOptSharedMemoryPermitted, &no, sizeof(no));
  const int withoutCuda = fi_setopt(fid, FI_OPT_ENDPOINT, kOptCudaApiPermitted, &no, sizeof(no));
  if (withoutCuda == -FI_EOPNOTSUPP) provider_.caps &= ~FI_HMEM;
  if (provider_.provider == "efa") {
    // Retry for ever if a receiver is slow: that is not an error. Deadlines end the wait.
    const size_t forEver = 7;
    fi_setopt(fid, FI_OPT_ENDPOINT, kOptEfaRnrRetry, &forEver, sizeof(forEver));
    bool emulated = false;
    size_t length = sizeof(emulated);
    if (fi_getopt(fid, FI_OPT_ENDPOINT, kOptEfaEmulatedWrite, &emulated, &length) == 0)
      provider_.emulatedWrite = emulated;
  }
  protocol_ = protocolOf(provider_, options);
  messageBytes_ = std::min(protocol_ == Protocol::Write ? kSmallMessageBytes : kLargeMessageBytes,
                           provider_.maxMessageBytes);
  if (messageBytes_ < kSmallMessageBytes)
    raise(ErrorKind::Transport, "provider {} takes messages of {} bytes only; smddp needs {}",
          provider_.provider, messageBytes_, kSmallMessageBytes);

  check(fi_ep_bind(endpoint_.get(), &addresses_->fid, 0), "fi_ep_bind of the address vector");
  check(fi_ep_bind(endpoint_.get(), &queue_->fid, FI_TRANSMIT | FI_RECV),
        "fi_ep_bind of the completion queue");
  if (provider_.quirks.needsEventQueue) {
    events_ = tryCreateEventQueue(*fabric_);
    const bool bound = events_ && fi_ep_bind(endpoint_.get(), &events_->fid, 0) == 0;
    if (!bound) events_.reset();
    SMDDP_LOG(Debug, "transport/fabric", "{} {} an event queue", provider_.provider,
              bound ? "has" : "takes no");
  }
  check(fi_enable(endpoint_.get()), "fi_enable");
}

void Endpoint::createOperations() {
  const auto bounded = [](size_t offered, size_t wanted) {
    return offered == 0 ? wanted : std::min(offered, wanted);
  };
  sends_.resize(bounded(info_->tx_attr->size, kMaxSends));
  receives_.resize(bounded(info_->rx_attr->size,
                           protocol_ == Protocol::Write ? kSmallReceives : kLargeReceives));
  // For a provider that takes one piece only, fragments are copied into the slot.
  const size_t sendSlot = roundUp(provider_.iovLimit >= 2 ? kSmallMessageBytes : messageBytes_);
  const size_t receiveSlot = roundUp(messageBytes_);

  const size_t bytes = sends_.size() * sendSlot + receives_.size() * receiveSlot;
  slab_ = allocatePages(bytes);
  registry_->addLocal({slab_.get(), bytes});
  void* const descriptor = registry_->descriptorOf({slab_.get(), bytes}).value();
  std::byte* next = slab_.get();
  for (PostedOperation& operation : sends_) {
    operation.slot = std::exchange(next, next + sendSlot);
    operation.slotDescriptor = descriptor;
    freeSends_.push_back(&operation);
  }
  for (PostedOperation& operation : receives_) {
    operation.slot = std::exchange(next, next + receiveSlot);
    operation.slotDescriptor = descriptor;
    unposted_.push_back(&operation);
  }
}

}  // namespace smddp::transport::fabric
