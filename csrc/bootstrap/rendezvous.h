// The rendezvous: the ranks of a group meet in a store that may hold keys of earlier meetings.
//
// The same store with the same prefix is used again after destroy + init, and by torchrun's restarts, in which ranks
// move between processes and the world may grow or shrink. A rank does not know how many meetings the others have had.
// So rank 0 numbers the meetings (epochs), and only its numbers count:
//
//   rank 0   epoch = add("epoch", 1)             a new number
//            close epoch - 1 and publish the number of its successor
//            publish <epoch>/in/0, collect all <epoch>/in/*, set <epoch>/closed = complete
//   rank r   epoch = add("epoch", 0)             maybe the number of an old meeting
//            already closed?  wait for its successor, start over
//            publish <epoch>/in/r, wait for <epoch>/closed
//            complete?        collect all <epoch>/in/*, done
//            superseded?      wait for its successor, start over
//
// A meeting is complete only after every rank has published in it, and no rank publishes in a closed one. So the values
// that a slow rank reads there never change. Each rank uses a constant number of keys, and of calls except those that
// ask whether a key is there.
//
// A rank that cannot take part, or meets a rank 0 that it cannot work with, leaves a note: under <epoch>/trouble while
// the epoch is open, else under <epoch>/after for the ranks that wait for its successor. Ranks that wait look for
// signals and at what they know of each other every kSlice, and for notes several times a second. So they hear of what
// is wrong although others have not come yet. A note or a rank 0 may be left over from a meeting that was interrupted:
// a rank that finds one as it comes gives this meeting's rank 0 kGrace to open another epoch.
//
// With a job token (seal.h) introductions and reports are sealed under their keys. Somebody without the token who
// reaches the store can delay a meeting, but can neither join it nor change its values. The numbers of epochs and their
// ends are not sealed; they only determine when a rank looks at which key.
//
// Threads: one. Errors: Timeout names the missing ranks, Mismatch the ranks that disagree; a rank's trouble has its own
// kind. What the watch throws passes through, and the others hear that this rank was interrupted. After an error the
// object cannot be used again; a new one on the same store starts a new meeting.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "bootstrap/introduction.h"
#include "bootstrap/locality.h"
#include "bootstrap/store.h"
#include "common/clock.h"
#include "common/seal.h"
#include "common/types.h"

namespace smddp::bootstrap {

class Rendezvous {
 public:
  // Tries to attach the memory of a candidate. If false, `why` says what failed. An exception counts as false.
  using Probe = std::function<bool(const Introduction& candidate, std::string* why)>;

  // A rank that is known to be gone, and how it went.
  struct Loss {
    Rank rank;
    Error error;
    bool died = false;  // did not leave in order
  };
  // A rank that waits calls this again and again. It returns the members that are lost, and may throw.
  using Watch = std::function<std::vector<Loss>()>;

  // The store is used during the calls below only. `timeout` bounds each of them. `jobRanks` has by rank the number in
  // the job, which texts have; empty: the same. Throws Usage if `me` is not a rank of the group; the other ranks hear
  // that, too.
  Rendezvous(Store& store, std::string group, Rank me, int size, Nanoseconds timeout,
             Seal seal = Seal(), Watch watch = {}, std::vector<Rank> jobRanks = {});

  // Returns the introductions of all ranks, by rank, after checkAgreement().
  std::vector<Introduction> exchange(const Introduction& mine);

  // Call it after exchange(). Returns which ranks share a node; the names are identical on all ranks. It takes a second
  // round through the store, unless all candidates know each other. If candidates cannot share memory, it logs a
  // warning, once per process.
  Locality agreeOnNodes(const std::vector<Introduction>& introductions, const Probe& probe);

  // Call it before exchange(): `earlier` is a meeting of the same ranks, which some of them may still be in.
  void follow(const Rendezvous& earlier);

  // After exchange(): tells the ranks that still call checkNotes() why this one cannot work with another. Throws
  // nothing.
  void tell(const Error& error) noexcept;
  // Throws the error of a rank that has left a note. It asks the store.
  void checkNotes();

 private:
  int64_t openEpoch();
  int64_t countEpoch(int64_t amount);
  void joinEpoch(const Introduction& mine, const Deadline& deadline);
  std::vector<Introduction> meet(const Introduction& mine);
  // Runs `phase`. If it fails while others may wait, leaves them a note.
  template <typename Phase>
  auto noted(const Phase& phase);
  std::vector<Store::Value> collect(const char* what, const Deadline& deadline);
  void publish(const char* what, std::span<const std::byte> blob);
  void unseal(const char* what, std::vector<Store::Value>& values) const;
  // Waits until the key is there. Throws the reason why nobody will set it, if there is one.
  void await(const char* what, const std::string& awaited, const Deadline& deadline);
  Store::Value awaitValue(const char* what, const std::string& awaited, const Deadline& deadline);
  void readNotes(const char* what);
  void readNote(const std::string& where);
  void raiseLoss(const char* what, const std::string& awaited);
  [[noreturn]] void raiseDeathOr(const Error& error);
  void compareWithFirst();
  [[noreturn]] void raiseMissing(const char* what);
  std::string key(const char* what, int64_t epoch) const;
  std::string key(const char* what, int64_t epoch, Rank rank) const;
  Nanoseconds left(const Deadline& deadline) const;
  Rank jobRank(Rank rank) const { return jobRankOf(jobRanks_, rank); }

  Store& store_;
  const std::string group_;
  const Rank me_;
  const int size_;
  const Nanoseconds timeout_;
  const Seal seal_;
  const MonotonicClock clock_;
  const Watch watch_;
  const std::vector<Rank> jobRanks_;
  // Where a rank of the meeting before this one would leave a note; empty: there was none.
  std::string earlierNote_;
  int64_t epoch_ = 0;
  bool isCauseKnown_ = false;           // the error is not the store's
  bool isIn_ = false;                   // in an epoch whose ranks wait for this one
  bool countsTooFew_ = false;           // has closed an epoch to which more ranks will come
  Nanoseconds cameAt_ = 0;              // when this rank came to the epoch
  const Introduction* mine_ = nullptr;  // until it was compared with that of rank 0
};

// For a rank that cannot even begin: the ranks that wait for it, or come later, raise `error`, which names it by its
// number in the job. Throws nothing.
void reportTrouble(Store& store, const std::string& group, Rank me, Rank jobRank, const Seal& seal,
                   const Error& error) noexcept;

}  // namespace smddp::bootstrap
