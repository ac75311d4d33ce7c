#include "bootstrap/rendezvous.h"

#include <atomic>
#include <charconv>
#include <exception>
#include <map>
#include <string_view>
#include <utility>

#include "common/error.h"
#include "common/log.h"

namespace smddp::bootstrap {
namespace {

constexpr const char* kIn = "in";          // <epoch>/in/<rank>: an introduction
constexpr const char* kNodes = "nodes";    // <epoch>/nodes/<rank>: a probe report
constexpr const char* kClosed = "closed";  // <epoch>/closed: complete or superseded
constexpr const char* kNext = "next";      // <epoch>/next: the epoch after it

constexpr std::string_view kComplete = "complete";
constexpr std::string_view kSuperseded = "superseded";

Store::Value toValue(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

std::string_view toText(const Store::Value& value) {
  return {reinterpret_cast<const char*>(value.data()), value.size()};
}

[[noreturn]] void raiseForeign(const std::string& key, const Store::Value& value) {
  raise(ErrorKind::Transport, "the store has \"{}\" under {}; is another program using it?",
        toText(value).substr(0, 40), key);
}

double seconds(Nanoseconds duration) { return static_cast<double>(duration) * 1e-9; }

ProbeReport probeCandidates(const std::vector<Introduction>& introductions, Rank me,
                            const Rendezvous::Probe& probe) {
  ProbeReport report;
  for (Rank rank = 0; rank < static_cast<Rank>(introductions.size()); ++rank) {
    if (rank == me || introductions[rank].nodeName != introductions[me].nodeName) continue;
    std::string why = "unknown cause";
    bool reached = false;
    bool exhausted = false;
    // Report every error as a failure of this pair, because the others wait for our report.
    try {
      reached = probe(introductions[rank], &why);
    } catch (const Error& error) {
      why = error.what();
      exhausted = error.kind() == ErrorKind::Resource;
    } catch (const std::exception& error) {
      why = error.what();
    }
    if (!reached) report.failures.push_back({rank, why, exhausted});
  }
  return report;
}

void warnOnce(const std::vector<std::string>& warnings) {
  static std::atomic<bool> warned{false};
  if (warnings.empty() || warned.exchange(true)) return;
  for (const auto& text : warnings) SMDDP_LOG(Warn, "bootstrap", "{}", text);
}

}  // namespace

Rendezvous::Rendezvous(Store& store, std::string group, Rank me, int size, Nanoseconds timeout,
                       Seal seal)
    : store_(store),
      group_(std::move(group)),
      me_(me),
      size_(size),
      timeout_(timeout),
      seal_(std::move(seal)) {
  SMDDP_CHECK(me >= 0 && me < size, "rank {} of {}", me, size);
}

std::vector<Introduction> Rendezvous::exchange(const Introduction& mine) {
  const Deadline deadline = Deadline::after(clock_, timeout_);
  const Store::Value blob = serialise(mine);
  std::vector<Store::Value> values;
  if (me_ == 0) {
    epoch_ = openEpoch();
    publish(kIn, blob);
    values = collect(kIn, deadline);
    store_.set(key(kClosed, epoch_), toValue(kComplete));
  } else {
    joinEpoch(blob, deadline);
    values = collect(kIn, deadline);
  }
  // Check after the meeting is closed, so that no rank waits for one that has thrown.
  unseal(kIn, values);
  std::vector<Introduction> introductions;
  for (Rank rank = 0; rank < size_; ++rank) {
    // For this rank take its own introduction, not the store's copy.
    introductions.push_back(rank == me_ ? mine : parseIntroduction(values[rank], rank));
  }
  checkTrouble(introductions, me_);
  checkAgreement(introductions);
  return introductions;
}

int64_t Rendezvous::countEpoch(int64_t amount) {
  const std::string counter = fmt::format("smddp/{}/epoch", group_);
  const int64_t epoch = store_.add(counter, amount);
  if (epoch < amount) {
    raise(ErrorKind::Transport, "the store counts {} under {}; is another program using it?", epoch,
          counter);
  }
  return epoch;
}

int64_t Rendezvous::openEpoch() {
  const int64_t epoch = countEpoch(1);
  // If the previous epoch is not closed, its meeting was interrupted. Ranks of this meeting may already wait in it.
  if (!store_.contains(key(kClosed, epoch - 1))) {
    store_.set(key(kClosed, epoch - 1), toValue(kSuperseded));
  }
  store_.set(key(kNext, epoch - 1), toValue(std::to_string(epoch)));
  return epoch;
}

void Rendezvous::joinEpoch(std::span<const std::byte> mine, const Deadline& deadline) {
  epoch_ = countEpoch(0);
  for (;;) {
    // Epoch 0 is the time before the first meeting. Do not publish in a closed epoch: slow ranks may still read there.
    if (epoch_ > 0 && !store_.contains(key(kClosed, epoch_))) {
      publish(kIn, mine);
      const Store::Value end = await(key(kClosed, epoch_), deadline);
      if (toText(end) == kComplete) return;
      if (toText(end) != kSuperseded) raiseForeign(key(kClosed, epoch_), end);
    }
    const Store::Value next = await(key(kNext, epoch_), deadline);
    int64_t number = 0;
    const auto text = toText(next);
    const char* end = text.data() + text.size();
    if (std::from_chars(text.data(), end, number).ptr != end || number <= epoch_) {
      raiseForeign(key(kNext, epoch_), next);
    }
    epoch_ = number;
  }
}

Locality Rendezvous::agreeOnNodes(const std::vector<Introduction>& introductions,
                                  const Probe& probe) {
  std::vector<ProbeReport> reports;
  if (needsProbing(introductions)) {
    const ProbeReport mine = probeCandidates(introductions, me_, probe);
    publish(kNodes, serialise(mine));
    auto values = collect(kNodes, Deadline::after(clock_, timeout_));
    unseal(kNodes, values);
    for (Rank rank = 0; rank < size_; ++rank) {
      reports.push_back(parseProbeReport(values[rank], rank, size_));
    }
  }
  Locality result = decideLocality(introductions, reports, me_);
  warnOnce(result.warnings);
  return result;
}

std::vector<Store::Value> Rendezvous::collect(const char* what, const Deadline& deadline) {
  std::vector<std::string> keys;
  for (Rank rank = 0; rank < size_; ++rank) keys.push_back(key(what, epoch_, rank));
  try {
    return store_.multiGet(keys, left(deadline));
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::Timeout) raiseMissing(what);
    throw;
  }
}

void Rendezvous::publish(const char* what, std::span<const std::byte> blob) {
  const std::string where = key(what, epoch_, me_);
  store_.set(where, seal_.close(where, blob));
}

void Rendezvous::unseal(const char* what, std::vector<Store::Value>& values) const {
  std::map<Seal::Verdict, std::vector<Rank>> found;
  for (Rank rank = 0; rank < size_; ++rank) {
    found[seal_.open(key(what, epoch_, rank), values[rank])].push_back(rank);
  }
  std::string wrong;
  for (const auto& [verdict, ranks] : found) {
    if (verdict == Seal::Verdict::Good) continue;
    const char* verb = ranks.size() == 1 ? "has" : "have";
    wrong += fmt::format("{}{} {} {}", wrong.empty() ? "" : ", ", listRanks(ranks), verb,
                         verdict == Seal::Verdict::NoToken      ? "no token"
                         : verdict == Seal::Verdict::Unexpected ? "a token"
                                                                : "another token");
  }
  if (wrong.empty()) return;
  raise(ErrorKind::Mismatch,
        "SMDDP_JOB_TOKEN is {} on rank {} of group {}, but {}. Give all ranks of the job the same "
        "one; if they have it, somebody else has written into the store",
        seal_.isEmpty() ? "not set" : "set", me_, group_, wrong);
}

Store::Value Rendezvous::await(const std::string& awaited, const Deadline& deadline) {
  try {
    return store_.get(awaited, left(deadline));
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::Timeout) raiseMissing(kIn);
    throw;
  }
}

void Rendezvous::raiseMissing(const char* what) {
  std::string missing;
  int count = 0;
  // Before rank 0 has opened the meeting, it is unknown which other ranks are late.
  const bool opened = epoch_ > 0 && !store_.contains(key(kClosed, epoch_));
  for (Rank rank = 0; rank < size_; ++rank) {
    if (opened || what == kNodes ? store_.contains(key(what, epoch_, rank)) : rank != 0) continue;
    missing += fmt::format("{}{}", count++ == 0 ? "" : ", ", rank);
  }
  // All have published, but the epoch is not closed: rank 0 did not close it.
  if (count == 0) missing = "0";
  raise(
      ErrorKind::Timeout,
      "rank {} waited {:.1f} s in group {} for rank{} {} of {}: not started, stuck before init, or "
      "stopped during it; look at their logs",
      me_, seconds(timeout_), group_, count > 1 ? "s" : "", missing, size_);
}

std::string Rendezvous::key(const char* what, int64_t epoch) const {
  return fmt::format("smddp/{}/{}/{}", group_, epoch, what);
}

std::string Rendezvous::key(const char* what, int64_t epoch, Rank rank) const {
  return fmt::format("smddp/{}/{}/{}/{}", group_, epoch, what, rank);
}

Nanoseconds Rendezvous::left(const Deadline& deadline) const {
  return std::max<Nanoseconds>(0, deadline.at - clock_.now());
}

}  // namespace smddp::bootstrap
