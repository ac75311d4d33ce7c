#include "transport/fabric/endpoint.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <utility>

#include "common/error.h"
#include "common/log.h"
#include "transport/fabric/wire.h"

namespace smddp::transport::fabric {
namespace {

constexpr const char* kTag = "transport/fabric";
constexpr size_t kMaxSends = 256;
constexpr size_t kReservedForControl = 16;
constexpr size_t kSmallReceives = 256;
constexpr size_t kLargeReceives = 64;  // 4 MiB in all
constexpr size_t kLargeMessageBytes = 64 * 1024;
constexpr size_t kSmallMessageBytes = sizeof(ControlHeader) + kMaxControlBytes;
// Remote writes complete here without a posted receive, so peers decide how many entries there are.
constexpr size_t kQueueEntries = 12288;
constexpr int kMaxFailedReceives = 1000;
// One look may stop between two messages of one connection, without a completion to show for it.
constexpr int kLooksBeforeSleep = 3;

// Options that headers after 1.17 name. Given by value, so that a build against an old header drives a
// newer library just as well; a library that does not know them refuses, and that is fine.
constexpr int kOptCudaApiPermitted = 10;
constexpr int kOptSharedMemoryPermitted = 11;
constexpr int kOptEfaRnrRetry = -(0xefa << 16);
constexpr int kOptEfaEmulatedWrite = kOptEfaRnrRetry + 2;

static_assert(offsetof(Operation, context) == 0);

size_t roundUp(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

Endpoint::Endpoint(const fi_info& raw, ProviderInfo chosen, const Options& options)
    : provider_(std::move(chosen)), info_(fi_dupinfo(&raw)) {
  if (!info_) raise(ErrorKind::Resource, "fi_dupinfo: out of memory");
  fabric_ = createFabric(*info_);
  domain_ = createDomain(*fabric_, *info_);
  addresses_ = createAddressVector(*domain_);
  openQueue();
  openEndpoint(options);
  registry_.emplace(*domain_, endpoint_.get(), provider_.mrMode, protocol_ == Protocol::Write);
  bounces_.emplace(*registry_);
  createOperations();
  postReceives();
}

Endpoint::~Endpoint() {
  // The endpoint first: the provider then touches no buffer any more. One that binds registrations to the
  // endpoint wants it the other way round and says so.
  if (endpoint_ && fi_close(&endpoint_->fid) == -FI_EBUSY) {
    registry_.reset();
    fi_close(&endpoint_->fid);
  }
  static_cast<void>(endpoint_.release());
  queue_.reset();
  addresses_.reset();
  registry_.reset();
}

void Endpoint::openQueue() {
  for (const fi_wait_obj wait : {FI_WAIT_FD, FI_WAIT_NONE}) {
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
  // Without it the caller looks from time to time, as with providers that have no descriptor.
  if (edge && ::epoll_ctl(edge.get(), EPOLL_CTL_ADD, descriptor, &event) == 0) edge_ = std::move(edge);
}

void Endpoint::openEndpoint(const Options& options) {
  endpoint_ = createEndpoint(*domain_, *info_);
  fid* const fid = &endpoint_->fid;
  // Shared memory inside a node is our own, and CUDA is not the provider's to call.
  const bool no = false;
  fi_setopt(fid, FI_OPT_ENDPOINT, kOptSharedMemoryPermitted, &no, sizeof(no));
  fi_setopt(fid, FI_OPT_ENDPOINT, kOptCudaApiPermitted, &no, sizeof(no));
  if (provider_.provider == "efa") {
    // A slow receiver is no error: whoever waits has a deadline.
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
    raise(ErrorKind::Transport, "provider {} takes messages of {} bytes only; smddp needs {}", provider_.provider,
          messageBytes_, kSmallMessageBytes);

  check(fi_ep_bind(endpoint_.get(), &addresses_->fid, 0), "fi_ep_bind of the address vector");
  check(fi_ep_bind(endpoint_.get(), &queue_->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind of the completion queue");
  check(fi_enable(endpoint_.get()), "fi_enable");
}

void Endpoint::createOperations() {
  const auto bounded = [](size_t offered, size_t wanted) { return offered == 0 ? wanted : std::min(offered, wanted); };
  sends_.resize(bounded(info_->tx_attr->size, kMaxSends));
  receives_.resize(bounded(info_->rx_attr->size, protocol_ == Protocol::Write ? kSmallReceives : kLargeReceives));
  // A provider that takes one piece only gets fragments copied into the slot.
  const size_t sendSlot = roundUp(provider_.iovLimit >= 2 ? kSmallMessageBytes : messageBytes_);
  const size_t receiveSlot = roundUp(messageBytes_);

  const size_t bytes = sends_.size() * sendSlot + receives_.size() * receiveSlot;
  slab_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
  registry_->addLocal({slab_.get(), bytes});
  bool known = false;
  void* const descriptor = registry_->descriptorOf({slab_.get(), bytes}, known);
  std::byte* next = slab_.get();
  for (Operation& operation : sends_) {
    operation.slot = std::exchange(next, next + sendSlot);
    operation.slotDescriptor = descriptor;
    freeSends_.push_back(&operation);
  }
  for (Operation& operation : receives_) {
    operation.slot = std::exchange(next, next + receiveSlot);
    operation.slotDescriptor = descriptor;
    unposted_.push_back(&operation);
  }
}

void Endpoint::postReceives() {
  while (!unposted_.empty()) {
    Operation* const operation = unposted_.back();
    const ssize_t result = fi_recv(endpoint_.get(), operation->slot, messageBytes_, operation->slotDescriptor,
                                   FI_ADDR_UNSPEC, &operation->context);
    if (result == -FI_EAGAIN) return;
    check(result, "fi_recv");
    unposted_.pop_back();
  }
}

std::vector<std::byte> Endpoint::name() const {
  size_t length = 0;
  fi_getname(&endpoint_->fid, nullptr, &length);  // fails, and says how long it is
  std::vector<std::byte> name(length);
  check(fi_getname(&endpoint_->fid, name.data(), &length), "fi_getname");
  name.resize(length);
  return name;
}

fi_addr_t Endpoint::insert(Bytes name) {
  fi_addr_t address = FI_ADDR_UNSPEC;
  if (fi_av_insert(addresses_.get(), name.data(), 1, &address, 0, nullptr) != 1)
    raise(ErrorKind::Transport, "provider {} does not take the address of a peer", provider_.provider);
  return address;
}

Operation* Endpoint::acquire(Operation::Kind kind) {
  const size_t reserved =
      kind == Operation::Kind::Put ? std::min(kReservedForControl, sends_.size() / 2) : 0;
  if (freeSends_.size() <= reserved) return nullptr;
  Operation* const operation = freeSends_.back();
  freeSends_.pop_back();
  operation->kind = kind;
  return operation;
}

void Endpoint::release(Operation& operation) {
  operation.put.reset();
  freeSends_.push_back(&operation);
}

ssize_t Endpoint::send(fi_addr_t to, Operation& operation, size_t headBytes, Bytes tail, void* tailDescriptor) {
  if (provider_.iovLimit < 2 && !tail.empty()) {
    std::memcpy(operation.slot + headBytes, tail.data(), tail.size());
    headBytes += tail.size();
    tail = {};
  }
  const std::array<iovec, 2> pieces = {
      {{operation.slot, headBytes}, {const_cast<std::byte*>(tail.data()), tail.size()}}};
  std::array<void*, 2> descriptors = {operation.slotDescriptor, tailDescriptor};
  fi_msg message{};
  message.msg_iov = pieces.data();
  message.desc = descriptors.data();
  message.iov_count = tail.empty() ? 1 : 2;
  message.addr = to;
  message.context = &operation.context;
  return fi_sendmsg(endpoint_.get(), &message, FI_COMPLETION);
}

ssize_t Endpoint::write(fi_addr_t to, Operation& operation, size_t headBytes, Bytes tail, void* tailDescriptor,
                        uint64_t address, uint64_t key, uint32_t immediate) {
  const std::array<iovec, 2> both = {
      {{operation.slot, headBytes}, {const_cast<std::byte*>(tail.data()), tail.size()}}};
  std::array<void*, 2> descriptors = {operation.slotDescriptor, tailDescriptor};
  const fi_rma_iov target{address, headBytes + tail.size(), key};
  // Without a head the tail is the whole message: the first piece is left out.
  const size_t first = headBytes == 0 ? 1 : 0;
  fi_msg_rma message{};
  message.msg_iov = both.data() + first;
  message.desc = descriptors.data() + first;
  message.iov_count = (tail.empty() ? 1 : 2) - first;
  message.addr = to;
  message.rma_iov = &target;
  message.rma_iov_count = 1;
  message.context = &operation.context;
  message.data = immediate;
  return fi_writemsg(endpoint_.get(), &message, FI_COMPLETION | FI_REMOTE_CQ_DATA);
}

size_t Endpoint::poll(Completions& handler) {
  postReceives();
  size_t total = std::exchange(numFound_, 0);
  for (size_t i = 0; i < total; ++i) dispatch(found_[i], handler);
  std::array<fi_cq_data_entry, kBatch> entries;
  // Bounded, so that a flood does not keep the caller from its other work.
  for (int round = 0; round < kBatch; ++round) {
    const ssize_t count = fi_cq_read(queue_.get(), entries.data(), entries.size());
    if (count == -FI_EAGAIN) break;
    if (count == -FI_EAVAIL) {
      readError(handler);
      ++total;
      continue;
    }
    check(count, "fi_cq_read");
    for (ssize_t i = 0; i < count; ++i) dispatch(entries[static_cast<size_t>(i)], handler);
    total += static_cast<size_t>(count);
    if (count < kBatch) break;
  }
  return total;
}

void Endpoint::dispatch(const fi_cq_data_entry& entry, Completions& handler) {
  // Only writes carry data; what the context is then differs between providers.
  if (entry.flags & FI_REMOTE_CQ_DATA) return handler.onRemoteWrite(static_cast<uint32_t>(entry.data));
  Operation* const operation = operationOf(entry.op_context);
  if (operation == nullptr) return;
  if (operation->kind == Operation::Kind::Receive) {
    failedReceives_ = 0;
    handler.onReceived({operation->slot, entry.len});
    unposted_.push_back(operation);
    postReceives();
    return;
  }
  handler.onSent(*operation);
  release(*operation);
}

void Endpoint::readError(Completions& handler) {
  fi_cq_err_entry error{};
  const ssize_t count = fi_cq_readerr(queue_.get(), &error, 0);
  if (count == -FI_EAGAIN) return;
  check(count, "fi_cq_readerr");
  std::array<char, 256> detail{};
  const char* const words =
      fi_cq_strerror(queue_.get(), error.prov_errno, error.err_data, detail.data(), detail.size());
  const std::string cause =
      fmt::format("{} ({}: {})", fi_strerror(error.err), provider_.provider, words ? words : "no detail");

  Operation* const operation = operationOf(error.op_context);
  if (operation == nullptr) raise(ErrorKind::Transport, "the fabric reports: {}", cause);
  if (operation->kind != Operation::Kind::Receive) {
    handler.onSendFailed(*operation, cause);
    release(*operation);
    return;
  }
  // A receive names no peer. A closed connection may cost one; without end it is the endpoint that is broken.
  SMDDP_LOG(Debug, kTag, "a posted receive failed: {}", cause);
  if (++failedReceives_ > kMaxFailedReceives) raise(ErrorKind::Transport, "receives keep failing: {}", cause);
  unposted_.push_back(operation);
}

bool Endpoint::prepareWait() {
  if (numFound_ > 0 || !unposted_.empty()) return false;
  if (!edge_) return true;
  // First forget the events so far, then look: what comes after that look is a new event.
  epoll_event event{};
  ::epoll_wait(edge_.get(), &event, 1, 0);
  std::array<fid*, 1> fids = {&queue_->fid};
  const int result = fi_trywait(fabric_.get(), fids.data(), static_cast<int>(fids.size()));
  if (result == -FI_EAGAIN) return false;
  check(result, "fi_trywait");
  for (int look = 0; look < kLooksBeforeSleep; ++look) {
    const ssize_t count = fi_cq_read(queue_.get(), found_.data(), found_.size());
    if (count == -FI_EAGAIN) continue;
    if (count > 0) numFound_ = static_cast<size_t>(count);
    return false;  // poll() also meets what is wrong, if something is
  }
  return true;
}

}  // namespace smddp::transport::fabric
