// One reliable-datagram endpoint with everything that belongs to it.
//
// Knows libfabric and nothing of peers, order or fragments: those are fabric.cc's.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/file_descriptor.h"
#include "transport/fabric/discovery.h"
#include "transport/fabric/fid.h"
#include "transport/fabric/memory.h"
#include "transport/fabric/operation.h"
#include "transport/fabric/provider.h"

namespace smddp::transport::fabric {

// Receives what Endpoint::poll() finds.
class Completions {
 public:
  virtual ~Completions() = default;
  // A Control or Put operation is over; it is back in the pool when the call returns.
  virtual void onSent(Operation& operation) = 0;
  // Valid during the call only: the buffer is posted again right after it.
  virtual void onReceived(Bytes message) = 0;
  virtual void onRemoteWrite(uint32_t immediate) = 0;
  // A Control or Put operation failed; likewise over.
  virtual void onSendFailed(Operation& operation, const std::string& cause) = 0;
};

// Owns fabric, domain, address vector, queues, endpoint, registrations and the pool of operations.
// Used by one thread at a time. Destruction cancels what is in flight and does not wait for it, where settle() says so.
// After an exception from poll() it can only be destroyed.
class Endpoint {
 public:
  // Opens what `chosen` describes; `raw` is the same in libfabric's words.
  Endpoint(const fi_info& raw, ProviderInfo chosen, const Options& options);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  const ProviderInfo& provider() const { return provider_; }
  Protocol protocol() const { return protocol_; }
  Registry& registry() { return *registry_; }
  BouncePool& bounces() { return *bounces_; }
  // Longest message that a peer's posted receives take.
  size_t messageBytes() const { return messageBytes_; }

  // Our address in the provider's form, for insert() at the peers.
  std::vector<std::byte> name() const;
  fi_addr_t insert(Bytes name);

  // An unused operation; null when all are in flight. Puts leave a few to control messages, so that grants get
  // through while bulk data waits.
  Operation* acquire(Operation::Kind kind);
  void release(Operation& operation);

  // Both return 0, -FI_EAGAIN when the provider has no room, or the error. The message is what lies in the slot
  // (headBytes), then `tail`.
  ssize_t send(fi_addr_t to, Operation& operation, size_t headBytes, Bytes tail,
               void* tailDescriptor);
  ssize_t write(fi_addr_t to, Operation& operation, size_t headBytes, Bytes tail,
                void* tailDescriptor, uint64_t address, uint64_t key, uint32_t immediate);

  // Makes progress. Returns how many completions there were.
  size_t poll(Completions& handler);

  // Before the destruction: whether that will not wait for anybody. If not the endpoint is to live until the process
  // ends. Takes a moment at most.
  bool settle() noexcept;

  // See Transport. Only poll() tells what ended a sleep.
  int waitDescriptor() const { return edge_.get(); }
  bool prepareWait();

 private:
  static constexpr int kBatch = 16;

  void openQueue();
  void openEdge();
  void openEndpoint(const Options& options);
  void createOperations();
  void postReceives();
  // Of ours, and with the provider; null for all else that a completion may name.
  Operation* takeBack(void* context);
  void dispatch(const fi_cq_data_entry& entry, Completions& handler);
  void readError(Completions& handler);
  void readEvents();

  ProviderInfo provider_;
  InfoPtr info_;
  Protocol protocol_ = Protocol::Send;
  size_t messageBytes_ = 0;
  int failures_ = 0;  // of receives, and of what is not ours, without a message in between

  // In the order of creation, because they are closed in the reverse order.
  Fabric fabric_;
  Domain domain_;
  Pages slab_;  // slots of all operations
  std::optional<BouncePool> bounces_;
  std::optional<Registry> registry_;
  std::vector<Operation> sends_, receives_;
  AddressVector addresses_;
  CompletionQueue queue_;
  EventQueue events_;  // null where none is needed
  EndpointFid endpoint_;

  // An epoll set that reports each event of the queue's descriptor once (EPOLLET). The tcp provider of 1.17
  // never takes its own signal back, so that its descriptor stays readable after the first completion.
  FileDescriptor edge_;
  // Completions that prepareWait() came across; poll() delivers them first.
  std::array<fi_cq_data_entry, kBatch> found_{};
  size_t numFound_ = 0;

  std::vector<Operation*> freeSends_;
  // Oldest first. Used again as late as possible: a provider may report the failure of one several times.
  std::deque<Operation*> failedSends_;
  std::vector<Operation*> unposted_;  // receives that the provider had no room for
};

}  // namespace smddp::transport::fabric
