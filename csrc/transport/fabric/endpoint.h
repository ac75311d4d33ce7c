// One reliable-datagram endpoint of libfabric, with the objects that it needs.
//
// It does not know peers, order or fragments: those are in fabric_transport.cc.
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
#include "transport/fabric/posted_operation.h"
#include "transport/fabric/provider.h"

namespace smddp::transport::fabric {

inline constexpr const char* kTag = "transport/fabric";  // of log lines

// Receives the completions that Endpoint::poll() finds.
class CompletionHandler {
 public:
  virtual ~CompletionHandler() = default;
  // A Control or Put operation has completed. It returns to the pool after the call.
  virtual void onSent(PostedOperation& operation) = 0;
  // `message` is valid during the call only; then its buffer is posted again.
  virtual void onReceived(Bytes message) = 0;
  virtual void onRemoteWrite(uint32_t immediate) = 0;
  // A Control or Put operation has failed. It returns to the pool after the call.
  virtual void onSendFailed(PostedOperation& operation, const std::string& cause) = 0;
};

// Owns fabric, domain, address vector, queues, endpoint, registrations and the pool of operations.
// Used by one thread at a time. The destructor cancels what is in flight, and does not block if settle() has returned
// true. After an exception from poll() the object can only be destroyed.
class Endpoint {
 public:
  // Opens what `chosen` describes; `raw` is libfabric's description of the same.
  Endpoint(const fi_info& raw, ProviderInfo chosen, const Options& options);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  const ProviderInfo& provider() const { return provider_; }
  Protocol protocol() const { return protocol_; }
  Registry& registry() { return *registry_; }
  BouncePool& bounces() { return *bounces_; }
  // The longest message that fits into a posted receive.
  size_t messageBytes() const { return messageBytes_; }

  // Our address in the provider's format. Peers pass it to insert().
  std::vector<std::byte> name() const;
  fi_addr_t insert(Bytes name);

  // Takes an unused operation; null if all are in flight. Some are reserved for control messages, so that grants can be
  // sent while bulk data waits.
  PostedOperation* acquire(PostedOperation::Kind kind);
  void release(PostedOperation& operation);

  // Both return 0, -FI_EAGAIN if the provider has no room, or an error. The message consists of the first headBytes of
  // the operation's slot, and of `tail`.
  ssize_t send(fi_addr_t to, PostedOperation& operation, size_t headBytes, Bytes tail,
               void* tailDescriptor);
  ssize_t write(fi_addr_t to, PostedOperation& operation, size_t headBytes, Bytes tail,
                void* tailDescriptor, uint64_t address, uint64_t key, uint32_t immediate);

  // Makes progress. Returns the number of completions.
  size_t poll(CompletionHandler& handler);

  // Called before the destruction; waits at most 0.2 s for what is in flight. True: the destructor will not block.
  // False: it might, so the endpoint must live until the process ends.
  bool settle() noexcept;

  // See Transport. The caller must poll() after a sleep to learn what has happened.
  int waitDescriptor() const { return edge_.get(); }
  bool prepareWait();

 private:
  static constexpr int kBatch = 16;

  void openQueue();
  void openEdge();
  void openEndpoint(const Options& options);
  void createOperations();
  void postReceives();
  // The operation of a completion, now no longer posted. Null if the completion names no posted operation of ours.
  PostedOperation* takeBack(void* context);
  void dispatch(const fi_cq_data_entry& entry, CompletionHandler& handler);
  void readError(CompletionHandler& handler);
  void readEvents();

  ProviderInfo provider_;
  InfoPtr info_;
  Protocol protocol_ = Protocol::Send;
  size_t messageBytes_ = 0;
  int failures_ = 0;  // failed receives and unknown completions since the last message

  // Declared in the order of creation, because they are closed in the reverse order.
  Fabric fabric_;
  Domain domain_;
  Pages slab_;  // the slots of all operations
  std::optional<BouncePool> bounces_;
  std::optional<Registry> registry_;
  std::vector<PostedOperation> sends_, receives_;
  AddressVector addresses_;
  CompletionQueue queue_;
  EventQueue events_;  // null if none is needed
  EndpointFid endpoint_;

  // An epoll set that reports each event of the queue's descriptor once (EPOLLET). It is needed because the tcp
  // provider of 1.17 never resets its signal, so that its descriptor stays readable after the first completion.
  FileDescriptor edge_;
  // Completions that prepareWait() has read; poll() delivers them first.
  std::array<fi_cq_data_entry, kBatch> found_{};
  size_t numFound_ = 0;

  std::vector<PostedOperation*> freeSends_;
  // Oldest first. Reused as late as possible, because a provider may report a failure several times.
  std::deque<PostedOperation*> failedSends_;
  std::vector<PostedOperation*> unposted_;  // receives that the provider had no room for
};

}  // namespace smddp::transport::fabric
