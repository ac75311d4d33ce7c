#include "transport/fabric/endpoint.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <utility>

#include "common/clock.h"
#include "common/error.h"
#include "common/log.h"

namespace smddp::transport::fabric {
namespace {

constexpr size_t kReservedForControl = 16;
constexpr int kMaxFailures = 1000;
constexpr Nanoseconds kSettling = 200'000'000;
// One read of the completion queue may process a part of a message and find no completion, although there is more.
constexpr int kReadsBeforeSleep = 3;

static_assert(offsetof(PostedOperation, context) == 0);

}  // namespace

Endpoint::~Endpoint() {
  // Close the endpoint first; then the provider does not touch any buffer. A provider that binds registrations to the
  // endpoint refuses (FI_EBUSY): there the registrations go first.
  if (endpoint_ && fi_close(&endpoint_->fid) == -FI_EBUSY) {
    registry_.reset();
    fi_close(&endpoint_->fid);
  }
  static_cast<void>(endpoint_.release());
  events_.reset();
  queue_.reset();
  addresses_.reset();
  registry_.reset();
}

void Endpoint::postReceives() {
  while (!unposted_.empty()) {
    PostedOperation* const operation = unposted_.back();
    const ssize_t result = fi_recv(endpoint_.get(), operation->slot, messageBytes_,
                                   operation->slotDescriptor, FI_ADDR_UNSPEC, &operation->context);
    if (result == -FI_EAGAIN) return;
    check(result, "fi_recv");
    operation->posted = true;
    unposted_.pop_back();
  }
}

std::vector<std::byte> Endpoint::name() const {
  size_t length = 0;
  fi_getname(&endpoint_->fid, nullptr, &length);  // fails, but returns the length
  std::vector<std::byte> name(length);
  check(fi_getname(&endpoint_->fid, name.data(), &length), "fi_getname");
  name.resize(length);
  return name;
}

fi_addr_t Endpoint::insert(Bytes name) {
  fi_addr_t address = FI_ADDR_UNSPEC;
  if (fi_av_insert(addresses_.get(), name.data(), 1, &address, 0, nullptr) != 1)
    raise(ErrorKind::Transport, "provider {} does not take the address of a peer",
          provider_.provider);
  return address;
}

PostedOperation* Endpoint::acquire(PostedOperation::Kind kind) {
  const size_t reserved =
      kind == PostedOperation::Kind::Put ? std::min(kReservedForControl, sends_.size() / 2) : 0;
  if (freeSends_.size() + failedSends_.size() <= reserved) return nullptr;
  PostedOperation* operation = nullptr;
  if (!freeSends_.empty()) {
    operation = freeSends_.back();
    freeSends_.pop_back();
  } else {
    operation = failedSends_.front();
    failedSends_.pop_front();
  }
  operation->kind = kind;
  return operation;
}

void Endpoint::release(PostedOperation& operation) {
  operation.put.reset();
  freeSends_.push_back(&operation);
}

ssize_t Endpoint::send(fi_addr_t to, PostedOperation& operation, size_t headBytes, Bytes tail,
                       void* tailDescriptor) {
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
  const ssize_t result = fi_sendmsg(endpoint_.get(), &message, FI_COMPLETION);
  operation.posted = result == 0;
  return result;
}

ssize_t Endpoint::write(fi_addr_t to, PostedOperation& operation, size_t headBytes, Bytes tail,
                        void* tailDescriptor, uint64_t address, uint64_t key, uint32_t immediate) {
  const std::array<iovec, 2> both = {
      {{operation.slot, headBytes}, {const_cast<std::byte*>(tail.data()), tail.size()}}};
  std::array<void*, 2> descriptors = {operation.slotDescriptor, tailDescriptor};
  const fi_rma_iov target{address, headBytes + tail.size(), key};
  // Without a head, leave out the first piece.
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
  const ssize_t result = fi_writemsg(endpoint_.get(), &message, FI_COMPLETION | FI_REMOTE_CQ_DATA);
  operation.posted = result == 0;
  return result;
}

PostedOperation* Endpoint::takeBack(void* context) {
  const auto lies = [context](std::vector<PostedOperation>& operations) -> PostedOperation* {
    const auto offset =
        reinterpret_cast<uintptr_t>(context) - reinterpret_cast<uintptr_t>(operations.data());
    if (offset >= operations.size() * sizeof(PostedOperation)) return nullptr;
    return offset % sizeof(PostedOperation) == 0 ? &operations[offset / sizeof(PostedOperation)]
                                                 : nullptr;
  };
  PostedOperation* operation = lies(sends_);
  if (operation == nullptr) operation = lies(receives_);
  return operation != nullptr && std::exchange(operation->posted, false) ? operation : nullptr;
}

size_t Endpoint::poll(CompletionHandler& handler) {
  postReceives();
  if (events_) readEvents();
  size_t total = std::exchange(numFound_, 0);
  for (size_t i = 0; i < total; ++i) dispatch(found_[i], handler);
  std::array<fi_cq_data_entry, kBatch> entries;
  // The number of rounds is bounded, so that many completions do not keep the caller from its other work.
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

void Endpoint::dispatch(const fi_cq_data_entry& entry, CompletionHandler& handler) {
  // Only remote writes carry data. Do not use their context: it differs between providers.
  if (entry.flags & FI_REMOTE_CQ_DATA)
    return handler.onRemoteWrite(static_cast<uint32_t>(entry.data));
  PostedOperation* const operation = takeBack(entry.op_context);
  if (operation == nullptr) return;
  if (operation->kind == PostedOperation::Kind::Receive) {
    failures_ = 0;
    handler.onReceived({operation->slot, entry.len});
    unposted_.push_back(operation);
    postReceives();
    return;
  }
  handler.onSent(*operation);
  release(*operation);
}

void Endpoint::readError(CompletionHandler& handler) {
  fi_cq_err_entry error{};
  const ssize_t count = fi_cq_readerr(queue_.get(), &error, 0);
  if (count == -FI_EAGAIN) return;
  check(count, "fi_cq_readerr");
  std::array<char, 256> detail{};
  const char* const words =
      fi_cq_strerror(queue_.get(), error.prov_errno, error.err_data, detail.data(), detail.size());
  const std::string cause = fmt::format("{} ({}: {})", library().describeError(error.err),
                                        provider_.provider, words ? words : "no detail");

  PostedOperation* const operation = takeBack(error.op_context);
  if (operation != nullptr && operation->kind != PostedOperation::Kind::Receive) {
    handler.onSendFailed(*operation, cause);
    operation->put.reset();
    failedSends_.push_back(operation);
    return;
  }
  // A failed receive names no peer. Neither does a remote write that was cut off, or an internal operation of the
  // provider. A closed connection may cause some such failures. If they do not end, the endpoint is broken.
  SMDDP_LOG(Debug, kTag, "{} failed: {}",
            operation != nullptr ? "a posted receive" : "an operation without a peer", cause);
  if (++failures_ > kMaxFailures) raise(ErrorKind::Transport, "receives keep failing: {}", cause);
  if (operation != nullptr) unposted_.push_back(operation);
}

// Logs errors that belong to no operation. If a message was lost, its receiver's deadline finds that.
void Endpoint::readEvents() {
  fi_eq_err_entry error{};
  uint32_t event = 0;
  const ssize_t count = fi_eq_read(events_.get(), &event, &error, sizeof(error), 0);
  if (count != -FI_EAVAIL || fi_eq_readerr(events_.get(), &error, 0) < 0) return;
  SMDDP_LOG(Warn, kTag, "{} reports: {} ({})", provider_.provider,
            library().describeError(error.err), error.prov_errno);
}

bool Endpoint::settle() noexcept {
  if (!provider_.quirks.closeBlocks) return true;
  struct Nobody final : CompletionHandler {
    void onSent(PostedOperation&) override {}
    void onReceived(Bytes) override {}
    void onRemoteWrite(uint32_t) override {}
    void onSendFailed(PostedOperation&, const std::string&) override {}
  } nobody;
  const auto settled = [this] { return freeSends_.size() + failedSends_.size() == sends_.size(); };
  try {
    const MonotonicClock clock;
    const Deadline deadline = Deadline::after(clock, kSettling);
    while (!settled() && !deadline.passed(clock)) poll(nobody);
  } catch (const std::exception& error) {
    SMDDP_LOG(Debug, kTag, "while the endpoint was about to be closed: {}", error.what());
  }
  return settled();
}

bool Endpoint::prepareWait() {
  if (numFound_ > 0 || !unposted_.empty()) return false;
  if (!edge_) return true;
  // First reset the epoll set, then read the queue: a completion after that read is a new event.
  epoll_event event{};
  ::epoll_wait(edge_.get(), &event, 1, 0);
  std::array<fid*, 1> fids = {&queue_->fid};
  const int result = fi_trywait(fabric_.get(), fids.data(), static_cast<int>(fids.size()));
  if (result == -FI_EAGAIN) return false;
  check(result, "fi_trywait");
  for (int i = 0; i < kReadsBeforeSleep; ++i) {
    const ssize_t count = fi_cq_read(queue_.get(), found_.data(), found_.size());
    if (count == -FI_EAGAIN) continue;
    if (count > 0) numFound_ = static_cast<size_t>(count);
    return false;  // on an error, too: poll() handles it
  }
  return true;
}

}  // namespace smddp::transport::fabric
