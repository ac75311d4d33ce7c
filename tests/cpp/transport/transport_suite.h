// The tests that every Transport must pass (transport_suite.cc).
//
// A test file describes its transport as a Kind and writes
//   INSTANTIATE_TEST_SUITE_P(Shm, TransportSuite, ::testing::Values(kind), kindName);
// All transports of a test live in one process and are polled by the test's own thread.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "common/clock.h"
#include "common/error.h"
#include "transport/recording_sink.h"
#include "transport/transport.h"

namespace smddp::transport::testing {

// Some transports of one kind that can reach each other but are not connected yet.
class Fixture {
 public:
  virtual ~Fixture() = default;
  virtual Transport& transport(int index) = 0;
  // Zeroed memory that transport(index) can register; lives until that transport is destroyed.
  virtual std::span<std::byte> allocate(int index, size_t bytes) = 0;
  virtual void destroy(int index) = 0;
  // False if the end of one peer may crash others of the same process.
  virtual bool survivesDestruction() const { return true; }
  // Called between polls, for kinds that have a clock of their own.
  virtual void advance() {}
};

// A Fixture for transports that take any memory.
class HeapFixture : public Fixture {
 public:
  explicit HeapFixture(std::vector<std::unique_ptr<Transport>> transports)
      : memory_(transports.size()), transports_(std::move(transports)) {}
  Transport& transport(int index) override { return *transports_.at(index); }
  std::span<std::byte> allocate(int index, size_t bytes) override {
    return memory_.at(index).emplace_back(bytes);
  }
  void destroy(int index) override { transports_.at(index).reset(); }

 private:
  std::vector<std::vector<std::vector<std::byte>>> memory_;  // outlives transports_
  std::vector<std::unique_ptr<Transport>> transports_;
};

struct Kind {
  std::string name;
  // Throws an Error of kind Usage if this machine has no such transport; the test is then skipped.
  std::function<std::unique_ptr<Fixture>(int count)> create;
};

inline std::string kindName(const ::testing::TestParamInfo<Kind>& info) { return info.param.name; }
inline void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

class TransportSuite : public ::testing::TestWithParam<Kind> {
 protected:
  static constexpr Nanoseconds kDeadline = 10'000'000'000;

  // Creates `count` transports; peerOf_[a][b] is b's id at a.
  void start(int count, bool connect = true);
  void introduce(int a, int b);
  Transport& at(int index) { return fixture_->transport(index); }
  void pollAll();
  // Polls all transports until the condition holds; false if that takes too long.
  [[nodiscard]] bool pollUntil(const std::function<bool()>& condition);
  // control() and put(), repeated while there is no room.
  void send(int from, int to, Bytes message);
  void put(int from, int to, const RemoteSlot& slot, uint32_t immediate, Bytes header,
           Bytes payload, uint64_t token);
  void expectNobodyFailed();

  MonotonicClock clock_;
  std::unique_ptr<Fixture> fixture_;
  std::vector<RecordingSink> sinks_;
  std::vector<bool> alive_;
  std::vector<std::vector<PeerId>> peerOf_;
};

}  // namespace smddp::transport::testing
