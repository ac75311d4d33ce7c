// How the ranks of a group meet in a store that may be full of old keys.
//
// The same store under the same prefix serves destroy + init, and torchrun's restarts, in which
// ranks move between processes and the world may grow or shrink. No rank can tell by itself how
// often the others have been here, so rank 0 numbers the meetings (epochs) and nothing else counts:
//
//   rank 0   epoch = add("epoch", 1)             a number nobody has used
//            close epoch - 1 and say what comes next
//            publish in/<epoch>/0, collect all in/<epoch>/*, set closed/<epoch> = complete
//   rank r   epoch = add("epoch", 0)             perhaps an old meeting's
//            already closed?  wait for its successor, start over
//            publish in/<epoch>/r, wait for closed/<epoch>
//            complete?        collect all in/<epoch>/*, done
//            superseded?      wait for its successor, start over
//
// A meeting closes only after every rank published in it, and nobody publishes in a closed one, so
// what a slow rank reads there never changes. No polling; a constant number of keys and calls per
// rank.
//
// With a job token (seal.h) what ranks say about themselves is sealed under the key it is stored at: somebody
// else who reaches the store can hold a meeting up, but neither join it nor change what is said. Epochs and
// their ends are not sealed; they decide nothing but when to look.
//
// Threads: one. Errors: Timeout names the missing ranks, Mismatch the ranks that disagree. The
// object is then spent; a new one on the same store starts a new meeting.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "bootstrap/introduction.h"
#include "bootstrap/locality.h"
#include "bootstrap/seal.h"
#include "bootstrap/store.h"
#include "common/clock.h"
#include "common/types.h"

namespace smddp::bootstrap {

class Rendezvous {
 public:
  // Tries to attach the memory of a candidate. On false, `why` says what failed. An exception
  // counts as false.
  using Probe = std::function<bool(const Introduction& candidate, std::string* why)>;

  // The store is used during the calls below only. `timeout` bounds each of them.
  Rendezvous(Store& store, std::string group, Rank me, int size, Nanoseconds timeout,
             Seal seal = Seal());

  // Everybody's introduction, by rank, parsed and in agreement. Raises the trouble that one of them tells.
  std::vector<Introduction> exchange(const Introduction& mine);

  // After exchange(): which ranks share a node. A second round through the store, left out when no
  // candidates are new to each other. Identical names on all ranks; what was not to be is a warning
  // in the log, once a process.
  Locality agreeOnNodes(const std::vector<Introduction>& introductions, const Probe& probe);

 private:
  int64_t openEpoch();
  int64_t countEpoch(int64_t amount);
  void joinEpoch(std::span<const std::byte> mine, const Deadline& deadline);
  std::vector<Store::Value> collect(const char* what, const Deadline& deadline);
  void publish(const char* what, std::span<const std::byte> blob);
  void unseal(const char* what, std::vector<Store::Value>& values) const;
  Store::Value await(const std::string& awaited, const Deadline& deadline);
  [[noreturn]] void raiseMissing(const char* what);
  std::string key(const char* what, int64_t epoch) const;
  std::string key(const char* what, int64_t epoch, Rank rank) const;
  Nanoseconds left(const Deadline& deadline) const;

  Store& store_;
  const std::string group_;
  const Rank me_;
  const int size_;
  const Nanoseconds timeout_;
  const Seal seal_;
  const MonotonicClock clock_;
  int64_t epoch_ = 0;
};

}  // namespace smddp::bootstrap
