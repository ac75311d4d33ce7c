// The store's server: a thread in the process of rank 0 that keeps keys and values.
//
// It serves whoever connects; values that matter are sealed by those who write them (common/seal.h). A client that
// sends anything but requests is disconnected.
//
// Threads: the constructor starts one; the destructor ends it, and with it the connections. Errors: the constructor
// throws Transport, naming the address, Resource, or Usage if nobody knows the host.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <thread>

#include "common/clock.h"
#include "common/file_descriptor.h"
#include "store/frames.h"

namespace smddp::store {

class Server {
 public:
  // Listens at `host`, a name or a numeric address, if that is an address of this machine; else on all interfaces, as
  // behind a translated address. Port 0: a free one. Waits so long for the name service
  // (sockets.h).
  Server(const std::string& host, uint16_t port, Nanoseconds timeout = 0);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  uint16_t port() const { return port_; }
  // Waits until so many clients have come, and all have gone. At most so long.
  void linger(int clients, Nanoseconds limit) const;

 private:
  struct Connection {
    FileDescriptor socket;
    Bytes received, toSend;
  };
  void run();
  void accept();
  // False: the client is gone, or sends what is no request.
  bool receive(Connection& connection);
  bool send(Connection& connection);
  Bytes answer(const Request& request);

  FileDescriptor listener_;
  FileDescriptor stop_;  // an eventfd
  uint16_t port_ = 0;
  std::map<std::string, Bytes> values_;
  std::map<std::string, int64_t> sums_;
  std::map<int, Connection> connections_;
  std::atomic<size_t> numConnected_{0};
  std::atomic<int> numCame_{0};
  std::thread thread_;
};

}  // namespace smddp::store
