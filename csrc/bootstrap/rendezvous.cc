#include "bootstrap/rendezvous.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <exception>
#include <map>
#include <string_view>
#include <thread>
#include <utility>

#include "bootstrap/blob.h"
#include "common/error.h"
#include "common/log.h"

namespace smddp::bootstrap {
namespace {

constexpr const char* kIn = "in";            // <epoch>/in/<rank>: an introduction
constexpr const char* kNodes = "nodes";      // <epoch>/nodes/<rank>: a probe report
constexpr const char* kClosed = "closed";    // <epoch>/closed: complete or superseded
constexpr const char* kNext = "next";        // <epoch>/next: the epoch after it
constexpr const char* kTrouble = "trouble";  // <epoch>/trouble: a note
constexpr const char* kAfter = "after";      // <epoch>/after: a note for the epoch after it

constexpr Nanoseconds kFirstPause = 200'000;
constexpr Nanoseconds kPausePerRank = 200'000;
constexpr Nanoseconds kLongestPause = 500'000'000;
constexpr Nanoseconds kSlice = 50'000'000;
// For keys that are set: only the store's answer is waited for. One process serves all ranks, perhaps on a machine that
// is as busy as they are.
constexpr Nanoseconds kAnswer = 60'000'000'000;
constexpr Nanoseconds kGrace = 300'000'000;
constexpr Nanoseconds kDeathIsKnown = 200'000'000;

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

std::string counterOf(const std::string& group) { return fmt::format("smddp/{}/epoch", group); }

std::string keyOf(const std::string& group, int64_t epoch, const char* what) {
  return fmt::format("smddp/{}/{}/{}", group, epoch, what);
}

// A note says why there will be no meeting, and who says so.
struct Note {
  Rank writer;
  Error error;
};

constexpr size_t kMaxNoteBytes = 1024;

Store::Value encode(const Note& note) {
  BlobWriter writer;
  writer.number(static_cast<uint32_t>(note.writer));
  // A bug of that rank is none of those who read it.
  const bool isBug = note.error.kind() == ErrorKind::Internal;
  writer.number(static_cast<uint8_t>(isBug ? ErrorKind::Aborted : note.error.kind()));
  writer.text("text", std::string_view(note.error.what()).substr(0, kMaxNoteBytes), kMaxNoteBytes);
  return writer.take();
}

// Returns nothing if the note was withdrawn, or if the bytes are not a note.
std::optional<Note> decodeNote(std::span<const std::byte> bytes) {
  try {
    BlobReader reader(bytes);
    const auto writer = static_cast<Rank>(reader.number<uint32_t>("writer"));
    const auto kind = reader.number<uint8_t>("kind");
    const std::string text = reader.text("text", kMaxNoteBytes);
    reader.end();
    if (text.empty() || kind >= static_cast<uint8_t>(ErrorKind::Internal)) return std::nullopt;
    return Note{writer, Error(static_cast<ErrorKind>(kind), text)};
  } catch (const BlobError&) {
    return std::nullopt;
  }
}

// A note is a courtesy: if the store fails, this rank still has its own error.
void leaveNote(Store& store, const std::string& where, const Seal& seal,
               const Note& note) noexcept {
  try {
    store.set(where, seal.close(where, encode(note)));
  } catch (const std::exception& error) {
    SMDDP_LOG(Debug, "bootstrap", "no other rank hears of \"{}\": {}", note.error.what(),
              error.what());
  }
}

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
                       Seal seal, Watch watch, std::vector<Rank> jobRanks)
    : store_(store),
      group_(std::move(group)),
      me_(me),
      size_(size),
      timeout_(timeout),
      seal_(std::move(seal)),
      watch_(std::move(watch)),
      jobRanks_(std::move(jobRanks)) {
  if (me >= 0 && me < size) return;
  const Error error(ErrorKind::Usage,
                    fmt::format("rank {} is not a rank of group {}, which has {} rank{}; look at "
                                "RANK and WORLD_SIZE",
                                me, group_, size, size == 1 ? "" : "s"));
  reportTrouble(store_, group_, me, me, seal_, error);
  throw error;
}

template <typename Phase>
auto Rendezvous::noted(const Phase& phase) {
  try {
    return phase();
  } catch (const Error& error) {
    // The others find out themselves whose time is over.
    if (isIn_ && error.kind() != ErrorKind::Timeout) {
      leaveNote(store_, key(kTrouble, epoch_), seal_, {me_, error});
      if (countsTooFew_) leaveNote(store_, key(kAfter, epoch_), seal_, {me_, error});
    }
    if (error.kind() == ErrorKind::PeerLost && !isCauseKnown_) raiseDeathOr(error);
    throw;
  } catch (...) {
    const auto text =
        fmt::format("{} was interrupted by a signal", describeThisProcess(jobRank(me_)));
    leaveNote(store_, key(isIn_ ? kTrouble : kAfter, epoch_), seal_,
              {me_, Error(ErrorKind::Aborted, text)});
    throw;
  }
}

std::vector<Introduction> Rendezvous::exchange(const Introduction& mine) {
  Introduction sized = mine;
  sized.groupSize = size_;
  sized.jobRank = jobRank(me_);
  return noted([&] { return meet(sized); });
}

std::vector<Introduction> Rendezvous::meet(const Introduction& mine) {
  const Deadline deadline = Deadline::after(clock_, timeout_);
  std::vector<Store::Value> values;
  if (me_ == 0) {
    epoch_ = openEpoch();
    isIn_ = true;
    publish(kIn, serialise(mine));
    // Left before this rank came. Whoever waits for this epoch finds it here, too.
    readNote(key(kAfter, epoch_ - 1));
    values = collect(kIn, deadline);
    store_.set(key(kClosed, epoch_), toValue(kComplete));
  } else {
    joinEpoch(mine, deadline);
    values = collect(kIn, deadline);
  }
  // Check after the meeting is closed, so that no rank waits for one that has thrown.
  unseal(kIn, values);
  std::vector<Introduction> introductions;
  for (Rank rank = 0; rank < size_; ++rank) {
    // For this rank take its own introduction, not the store's copy.
    introductions.push_back(rank == me_ ? mine : parseIntroduction(values[rank], jobRank(rank)));
  }
  countsTooFew_ = me_ == 0 && std::any_of(introductions.begin(), introductions.end(),
                                          [&](const auto& one) { return one.groupSize > size_; });
  checkAgreement(introductions);
  return introductions;
}

int64_t Rendezvous::countEpoch(int64_t amount) {
  const std::string counter = counterOf(group_);
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

void Rendezvous::joinEpoch(const Introduction& mine, const Deadline& deadline) {
  epoch_ = countEpoch(0);
  for (;;) {
    cameAt_ = clock_.now();
    // Epoch 0 is the time before the first meeting. Do not publish in a closed epoch: slow ranks may still read there.
    if (epoch_ > 0 && !store_.contains(key(kClosed, epoch_))) {
      isIn_ = true;
      mine_ = &mine;
      publish(kIn, serialise(mine));
      const Store::Value end = awaitValue(kClosed, key(kClosed, epoch_), deadline);
      mine_ = nullptr;
      if (toText(end) == kComplete) return;
      isIn_ = false;
      if (toText(end) != kSuperseded) raiseForeign(key(kClosed, epoch_), end);
    }
    const Store::Value next = awaitValue(kNext, key(kNext, epoch_), deadline);
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
    auto values = noted([&] { return collect(kNodes, Deadline::after(clock_, timeout_)); });
    unseal(kNodes, values);
    for (Rank rank = 0; rank < size_; ++rank) {
      reports.push_back(parseProbeReport(values[rank], jobRank(rank), size_));
    }
  }
  Locality result = decideLocality(introductions, reports, me_);
  warnOnce(result.warnings);
  return result;
}

std::vector<Store::Value> Rendezvous::collect(const char* what, const Deadline& deadline) {
  std::vector<std::string> keys;
  for (Rank rank = 0; rank < size_; ++rank) keys.push_back(key(what, epoch_, rank));
  if (!store_.containsAll(keys)) {
    // Waits for one key after the other. To ask for all of them again and again would be much work for the store.
    for (const auto& key : keys) await(what, key, deadline);
  }
  return store_.multiGet(keys, kAnswer);
}

void Rendezvous::publish(const char* what, std::span<const std::byte> blob) {
  const std::string where = key(what, epoch_, me_);
  store_.set(where, seal_.close(where, blob));
}

void Rendezvous::unseal(const char* what, std::vector<Store::Value>& values) const {
  std::map<Seal::Verdict, std::vector<Rank>> found;
  for (Rank rank = 0; rank < size_; ++rank) {
    found[seal_.open(key(what, epoch_, rank), values[rank])].push_back(jobRank(rank));
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
        seal_.isEmpty() ? "not set" : "set", jobRank(me_), group_, wrong);
}

// Asks again and again instead of waiting in the store, whose clients write a warning whenever a wait takes too long.
void Rendezvous::await(const char* what, const std::string& awaited, const Deadline& deadline) {
  // One process serves the store for all ranks.
  const Nanoseconds longest = std::clamp(size_ * kPausePerRank, kSlice, kLongestPause);
  Nanoseconds pause = kFirstPause;
  Nanoseconds lookAt = clock_.now() + kSlice;
  Nanoseconds readAt = clock_.now() + longest;
  while (!store_.contains(awaited)) {
    if (left(deadline) == 0) raiseMissing(what == kNodes ? kNodes : kIn);
    const Nanoseconds askAt = clock_.now() + std::min(pause, left(deadline));
    for (Nanoseconds now = clock_.now(); now < askAt; now = clock_.now()) {
      std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(askAt - now, kSlice)));
      if (clock_.now() < lookAt) continue;
      raiseLoss(what, awaited);
      lookAt = clock_.now() + kSlice;
    }
    pause = std::min(pause * 3 / 2, longest);
    if (clock_.now() < readAt) continue;
    readNotes(what);
    readAt = clock_.now() + longest;
  }
}

Store::Value Rendezvous::awaitValue(const char* what, const std::string& awaited,
                                    const Deadline& deadline) {
  await(what, awaited, deadline);
  return store_.get(awaited, kAnswer);
}

void Rendezvous::readNotes(const char* what) {
  if (clock_.now() - cameAt_ < kGrace) return;
  if (!earlierNote_.empty()) readNote(earlierNote_);
  readNote(key(what == kNext ? kAfter : kTrouble, epoch_));
  if (what == kClosed) compareWithFirst();
}

void Rendezvous::tell(const Error& error) noexcept {
  leaveNote(store_, key(kTrouble, epoch_), seal_, {me_, error});
}

void Rendezvous::checkNotes() {
  if (!earlierNote_.empty()) readNote(earlierNote_);
  readNote(key(kTrouble, epoch_));
}

void Rendezvous::follow(const Rendezvous& earlier) {
  earlierNote_ = earlier.key(kTrouble, earlier.epoch_);
}

// If a rank has died, that explains the error: the rank served the store that fails, or another rank has left because
// of it. But the death may become known a little later than what follows from it.
void Rendezvous::raiseDeathOr(const Error& error) {
  const Deadline deadline = Deadline::after(clock_, kDeathIsKnown);
  while (watch_ && !deadline.passed(clock_)) {
    for (const Loss& loss : watch_()) {
      if (loss.died) throw loss.error;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  throw error;
}

// A rank that is gone matters if it is still to come, or to close the epoch.
void Rendezvous::raiseLoss(const char* what, const std::string& awaited) {
  if (!watch_) return;
  const std::vector<Loss> losses = watch_();
  // If a rank has set the key before it was lost, its loss does not matter here.
  if (losses.empty() || store_.contains(awaited)) return;
  for (const Loss& loss : losses) {
    const char* sign = what == kNodes ? kNodes : kIn;
    const bool isToCome = what == kNext || !store_.contains(key(sign, epoch_, loss.rank));
    const bool isToClose =
        what == kClosed && loss.rank == 0 && !store_.contains(key(kClosed, epoch_));
    if (!isToCome && !isToClose) continue;
    // A rank that has left may have left because of another one.
    if (!loss.died) readNote(key(what == kNext ? kAfter : kTrouble, epoch_));
    isCauseKnown_ = true;
    if (loss.died) throw loss.error;
    raiseDeathOr(loss.error);
  }
}

void Rendezvous::readNote(const std::string& where) {
  if (!store_.contains(where)) return;
  Store::Value sealed = store_.get(where, kAnswer);
  if (seal_.open(where, sealed) != Seal::Verdict::Good) return;
  const auto note = decodeNote(sealed);
  if (!note) return;
  if (note->writer != me_) {
    isCauseKnown_ = true;
    throw note->error;
  }
  // This rank is here again.
  store_.set(where, seal_.close(where, encode({me_, Error(note->error.kind(), "")})));
}

void Rendezvous::compareWithFirst() {
  const std::string where = key(kIn, epoch_, 0);
  if (mine_ == nullptr || !store_.contains(where)) return;
  Store::Value sealed = store_.get(where, kAnswer);
  const Introduction& mine = *std::exchange(mine_, nullptr);
  // When all have come, unseal() says who has which token.
  if (seal_.open(where, sealed) != Seal::Verdict::Good) return;
  checkAgreement(parseIntroduction(sealed, jobRank(0)), mine);
}

void Rendezvous::raiseMissing(const char* what) {
  std::string missing;
  int count = 0;
  // Before rank 0 has opened the meeting, it is unknown which other ranks are late.
  const bool opened = epoch_ > 0 && !store_.contains(key(kClosed, epoch_));
  for (Rank rank = 0; rank < size_; ++rank) {
    if (opened || what == kNodes ? store_.contains(key(what, epoch_, rank)) : rank != 0) continue;
    missing += fmt::format("{}{}", count++ == 0 ? "" : ", ", jobRank(rank));
  }
  // All have published, but the epoch is not closed: rank 0 did not close it.
  if (count == 0) missing = fmt::format("{}", jobRank(0));
  raise(ErrorKind::Timeout,
        "rank {} waited {:.1f} s in group {} of {} ranks for rank{} {}: not started, stuck before "
        "init, or stopped during it; look at their logs",
        jobRank(me_), seconds(timeout_), group_, size_, count > 1 ? "s" : "", missing);
}

std::string Rendezvous::key(const char* what, int64_t epoch) const {
  return keyOf(group_, epoch, what);
}

std::string Rendezvous::key(const char* what, int64_t epoch, Rank rank) const {
  return fmt::format("smddp/{}/{}/{}/{}", group_, epoch, what, rank);
}

Nanoseconds Rendezvous::left(const Deadline& deadline) const {
  return std::max<Nanoseconds>(0, deadline.at - clock_.now());
}

void reportTrouble(Store& store, const std::string& group, Rank me, Rank jobRank, const Seal& seal,
                   const Error& error) noexcept {
  try {
    const int64_t epoch = store.add(counterOf(group), 0);
    const bool isOpen = epoch > 0 && !store.contains(keyOf(group, epoch, kClosed));
    const auto text =
        fmt::format("{} cannot take part: {}", describeThisProcess(jobRank), error.what());
    leaveNote(store, keyOf(group, epoch, isOpen ? kTrouble : kAfter), seal,
              {me, Error(error.kind(), text)});
  } catch (const std::exception& failure) {
    SMDDP_LOG(Debug, "bootstrap", "no other rank hears of \"{}\": {}", error.what(),
              failure.what());
  }
}

}  // namespace smddp::bootstrap
