#include "bootstrap/handle.h"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <tuple>

#include "bootstrap/blob.h"
#include "common/fnv.h"

namespace smddp::bootstrap {
namespace {

constexpr std::string_view kPrefix = "smddp:";
constexpr const char* kPurpose = "reconfigure handle";
constexpr size_t kMaxEntryBytes = 256;
constexpr size_t kMaxHandleBytes = 16 << 10;

[[noreturn]] void raiseNoHandle(const std::string& why) {
  raise(ErrorKind::Usage,
        "this is not a handle of smddp: {}; pass what get_reconfigure_handle() returned on each "
        "rank, unchanged",
        why);
}

std::vector<std::byte> bytesOf(std::string_view digits) {
  std::vector<std::byte> bytes;
  for (; digits.size() >= 2; digits.remove_prefix(2)) {
    uint8_t value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + 2, value, 16);
    if (error != std::errc() || end != digits.data() + 2) raiseNoHandle("it has other characters");
    bytes.push_back(std::byte{value});
  }
  if (!digits.empty()) raiseNoHandle("it was cut");
  return bytes;
}

}  // namespace

std::string textOf(const Handle& handle, const Seal& seal) {
  BlobWriter writer;
  writer.number(handle.mailbox);
  writer.number(handle.changes);
  writer.number(static_cast<uint32_t>(handle.rank));
  writer.raw(serialise(handle.introduction));
  std::string text(kPrefix);
  for (const std::byte byte : seal.close(kPurpose, writer.take()))
    text += fmt::format("{:02x}", static_cast<unsigned>(byte));
  return text;
}

Handle parseHandle(const std::string& text, const Seal& seal) {
  if (!text.starts_with(kPrefix)) raiseNoHandle("it does not begin with \"smddp:\"");
  if (text.size() > kMaxHandleBytes) raiseNoHandle("it is too long");
  auto bytes = bytesOf(std::string_view(text).substr(kPrefix.size()));
  if (seal.open(kPurpose, bytes) != Seal::Verdict::Good) {
    raiseNoHandle("it was made with another SMDDP_JOB_TOKEN, or was changed");
  }
  try {
    BlobReader reader(bytes);
    Handle handle;
    handle.mailbox = reader.number<uint64_t>("mailbox");
    handle.changes = reader.number<uint32_t>("changes");
    handle.rank = static_cast<Rank>(reader.number<uint32_t>("rank"));
    handle.introduction = parseIntroduction(reader.rest(), handle.rank);
    return handle;
  } catch (const BlobError& error) {
    raiseNoHandle(error.what());
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::Mismatch) throw;  // another version
    raiseNoHandle("it was cut or changed");
  }
}

void sortHandles(std::vector<Handle>& handles) {
  const auto key = [](const Handle& handle) {
    return std::tuple(handle.changes == 0, handle.rank, handle.introduction.processId,
                      handle.mailbox);
  };
  std::ranges::sort(handles, {}, key);
}

uint64_t digestOf(const std::vector<Handle>& handles) {
  Fnv1a digest;
  for (const Handle& handle : handles) {
    digest.add(handle.introduction.processId);
    digest.add(std::as_bytes(std::span(&handle.mailbox, 1)));
  }
  return digest.digest();
}

std::vector<std::byte> serialise(const MeetingNote& note) {
  BlobWriter writer;
  writer.number(static_cast<uint64_t>(note.uuid));
  writer.number(note.digest);
  writer.number(note.round);
  writer.number(note.errorKind);
  writer.text("text", note.text.substr(0, MeetingNote::kMaxText), MeetingNote::kMaxText);
  writer.bytes("entry", note.entry, kMaxEntryBytes);
  return writer.take();
}

MeetingNote parseNote(std::span<const std::byte> blob) {
  try {
    BlobReader reader(blob);
    MeetingNote note;
    note.uuid = static_cast<int64_t>(reader.number<uint64_t>("uuid"));
    note.digest = reader.number<uint64_t>("digest");
    note.round = reader.number<uint32_t>("round");
    note.errorKind = reader.number<uint32_t>("errorKind");
    note.text = reader.text("text", MeetingNote::kMaxText);
    note.entry = reader.bytes("entry", kMaxEntryBytes);
    reader.end();
    return note;
  } catch (const BlobError& error) {
    raise(ErrorKind::Transport, "another process sent a note that is none: {}", error.what());
  }
}

}  // namespace smddp::bootstrap
