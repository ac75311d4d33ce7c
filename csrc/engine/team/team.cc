#include "engine/team/team.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "engine/calls/call.h"

namespace smddp::engine::team {
namespace {

// A copy of something that a mate can change between two loads, made word by word.
template <typename T>
T copyShared(T& from) {
  static_assert(sizeof(T) % sizeof(uint64_t) == 0 && alignof(T) >= alignof(uint64_t));
  std::array<uint64_t, sizeof(T) / sizeof(uint64_t)> words;
  auto* source = reinterpret_cast<uint64_t*>(&from);
  for (uint64_t& word : words) word = loadShared(*source++);
  return std::bit_cast<T>(words);
}

}  // namespace

Team::Team(process::Process& process, const Membership& membership,
           std::shared_ptr<OwnRegion> region, const std::vector<GroupEntry>& entries)
    : process_(process),
      membership_(membership),
      region_(std::move(region)),
      mine_(region_->header()) {
  process_.ownership().assertOwned();
  region_->expectReaders();
  for (const Rank rank : topology().team()) {
    std::byte* bytes =
        rank == membership.me() ? region_->bytes().data() : checkedRegion(rank, entries[rank]);
    members_.push_back({reinterpret_cast<memory::RegionHeader*>(bytes), entries[rank].groupId});
    if (rank != membership.me()) bell_.add(*membership.peers[rank]);
  }
}

std::byte* Team::checkedRegion(Rank rank, const GroupEntry& entry) const {
  const process::Peer& peer = *membership_.peers[rank];
  const auto& memory = *peer.mate;
  if (entry.regionBytes != region_->bytes().size() ||
      entry.regionOffset < sizeof(transport::shm::ProcessPage) ||
      entry.regionOffset % memory::kPage != 0 || entry.regionOffset > memory.size() ||
      entry.regionBytes > memory.size() - entry.regionOffset) {
    raise(ErrorKind::Mismatch,
          "rank {} ({}) shares {} bytes for group \"{}\", this rank {}: do all ranks run the same "
          "smddp?",
          membership_.jobRank(rank), peer.describe(), entry.regionBytes, membership_.name,
          region_->bytes().size());
  }
  return memory.data() + entry.regionOffset;
}

Track Team::makeTrack(int64_t index) const {
  Track track;
  track.stores = transport::shm::StoreChoice(
      transport::shm::parseStagingStores(process_.settings.stagingStores));
  track.index = index;
  for (const Member& member : members_) {
    auto* region = reinterpret_cast<std::byte*>(member.region);
    track.headers.push_back(
        reinterpret_cast<memory::TrackHeader*>(region + region_->layout().trackOffset(index)));
    track.halves.push_back({region + region_->layout().halfOffset(index, 0),
                            region + region_->layout().halfOffset(index, 1)});
  }
  return track;
}

// --- executions -------------------------------------------------------------------------------------------

void Team::publish(const Track& track, const Descriptor& descriptor) {
  process_.ownership().assertOwned();
  memory::Arrival& mine = track.arrivalOf(topology().myLocal());
  mine.fingerprint = descriptor.fingerprint;
  mine.ready = std::max<uint32_t>(1, static_cast<uint32_t>(descriptor.ends.size()));
  mine.shared = descriptor.buffers != nullptr ? 1 : 0;
  mine.isNear = descriptor.isNear ? 1 : 0;
  std::copy(descriptor.ends.begin(), descriptor.ends.end(), mine.ends.begin());
  if (descriptor.buffers != nullptr) mine.buffers = *descriptor.buffers;
}

bool Team::allArrived(const Track& track) const {
  for (int local = 0; local < topology().teamSize(); ++local) {
    if (!track.hasArrived(local)) return false;
  }
  return true;
}

std::set<Rank> Team::absent(const Track& track) const {
  std::set<Rank> ranks;
  for (int local = 0; local < topology().teamSize(); ++local) {
    if (!track.hasArrived(local)) ranks.insert(topology().team()[local]);
  }
  return ranks;
}

Agreement Team::agree(const Track& track) const {
  process_.ownership().assertOwned();
  memory::Arrival& mine = track.arrivalOf(topology().myLocal());
  const transport::CallFingerprint call = copyShared(mine.fingerprint);
  Agreement agreement{
      .fused = mine.ready, .shared = mine.shared != 0, .afterArrival = mine.shared != 0};
  for (int local = 0; local < topology().teamSize(); ++local) {
    if (local == topology().myLocal()) continue;
    memory::Arrival& theirs = track.arrivalOf(local);
    membership_.requireSameCall(topology().team()[local], copyShared(theirs.fingerprint), call);
    agreement.fused = std::clamp<uint32_t>(loadShared(theirs.ready), 1, agreement.fused);
    const bool isShared = loadShared(theirs.shared) != 0;
    agreement.shared &= isShared;
    agreement.afterArrival |= isShared;
  }
  for (int local = 0; agreement.fused > 1 && local < topology().teamSize(); ++local) {
    memory::Arrival& theirs = track.arrivalOf(local);
    for (uint32_t i = 0; i < agreement.fused; ++i) {
      const uint32_t end = loadShared(theirs.ends[i]);
      if (end == mine.ends[i]) continue;
      // Fused calls differ in their sizes only. All before this one are equal, so it begins at the same place.
      const uint32_t begin = i == 0 ? 0 : mine.ends[i - 1];
      transport::CallFingerprint theirCall = call, myCall = call;
      theirCall.bytes = end - begin;
      myCall.bytes = mine.ends[i] - begin;
      membership_.requireSameCall(topology().team()[local], theirCall, myCall);
    }
  }
  return agreement;
}

std::byte* Team::inputOf(const Track& track, int local, int64_t bytes) const {
  return resolve(local, track.arrivalOf(local).buffers.input, bytes);
}

std::byte* Team::outputOf(const Track& track, int local, int64_t bytes) const {
  return resolve(local, track.arrivalOf(local).buffers.output, bytes);
}

std::byte* Team::resolve(int local, transport::shm::Location& at, int64_t bytes) const {
  if (bytes == 0) return nullptr;  // the collective gives this rank no such buffer
  const process::Peer& peer = *membership_.peers[topology().team()[local]];
  return peer.memory->resolve(copyShared(at), static_cast<size_t>(bytes));
}

void Team::prepareStaging(Track& track, size_t bytes, bool isSent) {
  const auto half = static_cast<size_t>(track.executionNumber & 1);
  const bool registers = isSent && bytes > track.registered[half];
  // The registered part grows by doubling, because each time all of it is registered anew.
  if (registers)
    bytes = std::min(std::bit_ceil(bytes), static_cast<size_t>(region_->layout().halfBytes));
  std::byte* from = track.halves[topology().myLocal()][half];
  if (bytes > track.committed[half]) {
    process_.memory().slab->commit({from + track.committed[half], bytes - track.committed[half]});
    track.committed[half] = bytes;
  }
  if (!registers) return;
  process_.addSource({from, bytes});
  track.registered[half] = bytes;
}

// --- state of the group -----------------------------------------------------------------------------------

void Team::publishCalled(uint64_t sequence) {
  mine_.called.store(sequence, std::memory_order_relaxed);
}

uint64_t Team::calledBy(Rank rank) const {
  return member(rank).region->called.load(std::memory_order_relaxed);
}

void Team::publishBlame(const Blame& blame) {
  mine_.blame.store(blame.pack(), std::memory_order_relaxed);
}

void Team::clearBlame() {
  if (mine_.blame.load(std::memory_order_relaxed) != 0) mine_.blame.store(0);
}

Blame Team::blameOf(Rank rank) const {
  return Blame::unpack(member(rank).region->blame.load(std::memory_order_relaxed),
                       membership_.size());
}

void Team::publishBreak(const calls::Break& broken) {
  region_->publishBreak(broken);
  bell_.signalled();
  bell_.ring();
}

std::optional<calls::Break> Team::nextBreak() {
  process_.ownership().assertOwned();
  for (int local = 0; local < topology().teamSize(); ++local) {
    if (local == topology().myLocal()) continue;
    Member& mate = members_[local];
    const uint32_t number =
        std::min(mate.region->numBreaks.load(std::memory_order_acquire), memory::kMaxBreaks);
    if (mate.breaksRead >= number) continue;
    const memory::BreakRecord& record = mate.region->breaks[mate.breaksRead++];
    return calls::Break{record.firstBroken,
                        Error(calls::errorKindOf(record.kind),
                              std::string(record.text, strnlen(record.text, sizeof record.text))),
                        record.lost, record.noticedBy, record.isHostSilent != 0};
  }
  return std::nullopt;
}

void Team::publishTrouble(const Trouble& trouble) {
  process_.ownership().assertOwned();
  if (mine_.trouble.load(std::memory_order_relaxed) != 0) return;
  auto& text = mine_.troubleText;
  text[trouble.text.copy(text, sizeof text - 1)] = 0;
  mine_.trouble.store(trouble.calls + 1, std::memory_order_release);
}

std::optional<Trouble> Team::troubleOf(Rank mate) const {
  const memory::RegionHeader& theirs = *member(mate).region;
  const uint64_t found = theirs.trouble.load(std::memory_order_acquire);
  if (found == 0 || calledBy(mate) >= found) return std::nullopt;
  const auto& text = theirs.troubleText;
  return Trouble{found - 1, std::string(text, strnlen(text, sizeof text))};
}

void Team::publishLeft() {
  process_.ownership().assertOwned();
  mine_.left.store(1, std::memory_order_release);
  bell_.signalled();
  bell_.ring();
}

bool Team::hasLeft(Rank rank) const {
  return member(rank).region->left.load(std::memory_order_acquire) != 0;
}

bool Team::mayUseMemory(Rank rank) const {
  const Member& theirs = member(rank);
  return theirs.region->group.load(std::memory_order_acquire) == theirs.group && !hasLeft(rank);
}

}  // namespace smddp::engine::team
