// The rendezvous: the ranks of a group meet in a store that may hold keys of earlier meetings.
//
// The same store with the same prefix is used again after destroy + init, and by torchrun's restarts, in which ranks
// move between processes and the world may grow or shrink. A rank does not know how many meetings the others have had.
// So rank 0 numbers the meetings (epochs), and only its numbers count:
//
//   rank 0   epoch = add("epoch", 1)             a new number
//            close epoch - 1 and publish the number of its successor
//            publish in/<epoch>/0, collect all in/<epoch>/*, set closed/<epoch> = complete
//   rank r   epoch = add("epoch", 0)             maybe the number of an old meeting
//            already closed?  wait for its successor, start over
//            publish in/<epoch>/r, wait for closed/<epoch>
//            complete?        collect all in/<epoch>/*, done
//            superseded?      wait for its successor, start over
//
// A meeting is complete only after every rank has published in it, and no rank publishes in a closed one. So the values
// that a slow rank reads there never change. Nothing polls; each rank uses a constant number of keys and calls.
//
// With a job token (seal.h) introductions and reports are sealed under their keys. Somebody without the token who
// reaches the store can delay a meeting, but can neither join it nor change its values. The numbers of epochs and their
// ends are not sealed; they only determine when a rank looks at which key.
//
// Threads: one. Errors: Timeout names the missing ranks, Mismatch the ranks that disagree. After an error the object
// cannot be used again; a new one on the same store starts a new meeting.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "bootstrap/introduction.h"
#include "bootstrap/locality.h"
#include "common/seal.h"
#include "bootstrap/store.h"
#include "common/clock.h"
#include "common/types.h"

namespace smddp::bootstrap {

class Rendezvous {
 public:
  // Tries to attach the memory of a candidate. If false, `why` says what failed. An exception counts as false.
  using Probe = std::function<bool(const Introduction& candidate, std::string* why)>;

  // The store is used during the calls below only. `timeout` bounds each of them.
  Rendezvous(Store& store, std::string group, Rank me, int size, Nanoseconds timeout,
             Seal seal = Seal());

  // Returns the introductions of all ranks, by rank, after checkTrouble() and checkAgreement().
  std::vector<Introduction> exchange(const Introduction& mine);

  // Call it after exchange(). Returns which ranks share a node; the names are identical on all ranks. It takes a second
  // round through the store, unless all candidates know each other. If candidates cannot share memory, it logs a
  // warning, once per process.
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
