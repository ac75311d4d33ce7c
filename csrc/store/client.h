// A client of the store's server.
//
// Threads: one caller at a time, as bootstrap::Store demands. Errors: Timeout; PeerLost if the server is gone. Waits
// hear of signals.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <vector>

#include "bootstrap/store.h"
#include "common/clock.h"
#include "common/file_descriptor.h"
#include "store/frames.h"

namespace smddp::store {

class Client final : public bootstrap::Store {
 public:
  // Connects, and waits until the server is there. Each later call that waits for nothing has the same time. Throws
  // Usage if nobody knows the host (sockets.h).
  Client(const std::string& host, uint16_t port, Nanoseconds timeout);

  void set(const std::string& key, const Value& value) override;
  Value get(const std::string& key, Nanoseconds timeout) override;
  int64_t add(const std::string& key, int64_t amount) override;
  bool contains(const std::string& key) override { return containsAll({key}); }
  bool containsAll(const std::vector<std::string>& keys) override;
  std::vector<Value> multiGet(const std::vector<std::string>& keys, Nanoseconds timeout) override;

 private:
  // Tries each address of the host once. Returns 0, or an errno.
  int connectToAny(const Deadline& deadline);
  // Tries `address_`.
  int connect(Nanoseconds timeout);
  // The reply, without its length. After an error the connection is closed, and the next call makes another.
  Bytes ask(const Request& request);
  Bytes exchange(const Request& request);
  // False: the time is over.
  bool isReady(const FileDescriptor& socket, short events, const Deadline& deadline) const;
  // Waits for the socket. Throws Timeout.
  void await(short events, const Deadline& deadline) const;
  [[noreturn]] void raiseLost(const std::string& why) const;

  const std::string host_;
  const uint16_t port_;
  const Nanoseconds timeout_;
  const MonotonicClock clock_;
  sockaddr_storage address_{};  // the last that was tried
  socklen_t addressSize_ = 0;
  FileDescriptor socket_;
};

}  // namespace smddp::store
