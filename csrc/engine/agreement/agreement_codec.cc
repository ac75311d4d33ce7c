#include "engine/agreement/agreement_codec.h"

#include <string>

#include "bootstrap/blob.h"

namespace smddp::engine::agreement {
namespace {

using bootstrap::BlobError;
using bootstrap::BlobReader;
using bootstrap::BlobWriter;

constexpr size_t kMaxCard = 8192;
constexpr uint32_t kMaxMembers = 1 << 16;

void write(BlobWriter& writer, const Ballot& ballot) {
  writer.number(ballot.attempt);
  writer.number(ballot.leader);
}

Ballot readBallot(BlobReader& reader) {
  const auto attempt = reader.number<uint32_t>("attempt");
  return {attempt, reader.number<MemberId>("leader")};
}

void write(BlobWriter& writer, const std::vector<Member>& members) {
  writer.number(static_cast<uint32_t>(members.size()));
  for (const Member& member : members) {
    writer.number(member.id);
    writer.text("card", member.card, kMaxCard);
  }
}

uint32_t readCount(BlobReader& reader, const char* field) {
  const auto count = reader.number<uint32_t>(field);
  if (count > kMaxMembers) throw BlobError(fmt::format("{} has {} entries", field, count));
  return count;
}

std::vector<Member> readMembers(BlobReader& reader) {
  std::vector<Member> members;
  for (uint32_t left = readCount(reader, "members"); left > 0; --left) {
    const auto id = reader.number<MemberId>("id");
    members.push_back({id, reader.text("card", kMaxCard)});
  }
  return members;
}

}  // namespace

std::vector<std::byte> serialise(MemberId from, const Message& message) {
  BlobWriter writer;
  writer.number(from);
  writer.number(static_cast<uint8_t>(message.kind));
  writer.number(message.generation);
  write(writer, message.ballot);
  writer.number(static_cast<uint32_t>(message.suspects.size()));
  for (const auto& [who, how] : message.suspects) {
    writer.number(who);
    writer.number(static_cast<uint8_t>(how));
  }
  write(writer, message.newcomers);
  writer.number(static_cast<uint64_t>(message.committed));
  writer.number(static_cast<uint64_t>(message.voted));
  write(writer, message.acceptedBallot);
  writer.number(message.decided.number);
  write(writer, message.decided.members);
  writer.number(static_cast<uint64_t>(message.decided.step));
  return writer.take();
}

std::pair<MemberId, Message> parseMessage(std::span<const std::byte> bytes) {
  try {
    BlobReader reader(bytes);
    const auto from = reader.number<MemberId>("from");
    Message message;
    const auto kind = reader.number<uint8_t>("kind");
    if (kind > static_cast<uint8_t>(Message::Kind::Minority)) {
      throw BlobError(fmt::format("its kind is {}", kind));
    }
    message.kind = static_cast<Message::Kind>(kind);
    message.generation = reader.number<uint64_t>("generation");
    message.ballot = readBallot(reader);
    for (uint32_t left = readCount(reader, "suspects"); left > 0; --left) {
      const auto who = reader.number<MemberId>("suspect");
      const bool isDead = reader.number<uint8_t>("suspicion") != 0;
      message.suspects.emplace(who, isDead ? Suspicion::Dead : Suspicion::Silent);
    }
    message.newcomers = readMembers(reader);
    message.committed = static_cast<int64_t>(reader.number<uint64_t>("committed"));
    message.voted = static_cast<int64_t>(reader.number<uint64_t>("voted"));
    message.acceptedBallot = readBallot(reader);
    message.decided.number = reader.number<uint64_t>("decided");
    message.decided.members = readMembers(reader);
    message.decided.step = static_cast<int64_t>(reader.number<uint64_t>("step"));
    reader.end();
    return {from, std::move(message)};
  } catch (const BlobError& error) {
    raise(ErrorKind::Transport, "another process sent a message of the agreement that is none: {}",
          error.what());
  }
}

}  // namespace smddp::engine::agreement
