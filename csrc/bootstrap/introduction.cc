#include "bootstrap/introduction.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "bootstrap/blob.h"
#include "bootstrap/node_name.h"
#include "common/error.h"

namespace smddp::bootstrap {
namespace {

// Every version writes these first and in the same way, so that a rank with another version is recognised.
constexpr uint32_t kMagic = 0x50444d53;  // "SMDP"
constexpr uint32_t kProtocolVersion = 2;

constexpr size_t kMaxVersionBytes = 64;
constexpr size_t kMaxHostBytes = 256;
constexpr size_t kMaxSettingsBytes = 4096;
constexpr size_t kMaxOpaqueBytes = 1024;

// These settings determine plans, slot sizes, the order of operations and the path of calls. With different values two
// ranks would wait for messages that the other never sends, or would give each other up at different times.
constexpr std::array<std::string_view, 11> kMustAgree = {
    "algorithm", "wire",     "oneShotBytes", "chunkBytes", "fabricChunkBytes", "fabricWindow",
    "poolBytes", "inFlight", "fusionBytes",  "gpuPath",    "hostTimeout"};

bool mustAgree(std::string_view field) {
  return std::find(kMustAgree.begin(), kMustAgree.end(), field) != kMustAgree.end();
}

// Leaves out defaults, to keep the blob short: they are equal in the same version.
std::string settingsToAgreeOn(const Settings& settings) {
  const Settings defaults;
  std::string text;
#define SMDDP_LINE(type, field, env, value, ...)                \
  if (mustAgree(#field) && settings.field != defaults.field) {  \
    text += fmt::format("{}={}\n", env, print(settings.field)); \
  }
  SMDDP_SETTINGS(SMDDP_LINE)
#undef SMDDP_LINE
  return text;
}

std::map<std::string, std::string> parseSettings(std::string_view text) {
  std::map<std::string, std::string> values;
  while (!text.empty()) {
    const auto line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    const size_t equals = std::min(line.find('='), line.size());
    values[std::string(line.substr(0, equals))] = line.substr(std::min(equals + 1, line.size()));
  }
  return values;
}

// The value of a rank that did not publish one: the default.
std::string printDefault(std::string_view name) {
  const Settings defaults;
  std::string text = "unset";
#define SMDDP_DEFAULT(type, field, env, value, ...) \
  if (name == (env)) text = print(defaults.field);
  SMDDP_SETTINGS(SMDDP_DEFAULT)
#undef SMDDP_DEFAULT
  return text.empty() ? "unset" : text;
}

// Describes the differences: "SMDDP_CHUNK_BYTES is 262144 on ranks 0-2 and 65536 on rank 3; …"
std::string differences(const std::map<Rank, const Introduction*>& introductions) {
  std::map<Rank, std::map<std::string, std::string>> told;
  std::set<std::string> names;
  for (const auto& [rank, introduction] : introductions) {
    told[rank] = parseSettings(introduction->settings);
    for (const auto& [name, value] : told[rank]) names.insert(name);
  }
  std::string text;
  for (const std::string& name : names) {
    const std::string byDefault = printDefault(name);
    // The values in the order of the first rank that has each.
    std::vector<std::pair<std::string, std::vector<Rank>>> values;
    for (const auto& [rank, itsSettings] : told) {
      const auto found = itsSettings.find(name);
      const std::string& value = found == itsSettings.end() ? byDefault : found->second;
      auto same = std::find_if(values.begin(), values.end(),
                               [&](const auto& known) { return known.first == value; });
      if (same == values.end()) same = values.insert(values.end(), {value, {}});
      same->second.push_back(rank);
    }
    if (values.size() == 1) continue;
    text += fmt::format("{}{} is ", text.empty() ? "" : "; ", name);
    for (const auto& [value, ranks] : values) {
      text += fmt::format("{}{} on {}", value == values.front().first ? "" : " and ", value,
                          listRanks(ranks));
    }
  }
  return text;
}

std::string hostName() {
  std::array<char, kMaxHostBytes> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "unknown host";
  return name.data();
}

std::string describe(Rank rank, const std::string& host, int pid) {
  return fmt::format("rank {} ({}, pid {})", rank, host, pid);
}

Introduction parseFields(BlobReader& reader) {
  Introduction result;
  result.groupSize = static_cast<int32_t>(reader.number<uint32_t>("groupSize"));
  result.host = reader.text("host", kMaxHostBytes);
  result.pid = static_cast<int32_t>(reader.number<uint32_t>("pid"));
  reader.raw("processId", result.processId);
  result.nodeName = reader.text("nodeName", kMaxNodeNameBytes);
  result.nodeAgreement = reader.number<uint64_t>("nodeAgreement");
  result.settings = reader.text("settings", kMaxSettingsBytes);
  result.slab = reader.bytes("slab", kMaxOpaqueBytes);
  result.fabric = reader.bytes("fabric", kMaxOpaqueBytes);
  result.lifeline = reader.bytes("lifeline", kMaxOpaqueBytes);
  result.group = reader.bytes("group", kMaxOpaqueBytes);
  reader.end();
  return result;
}

// `all` has at least these two.
void checkPair(const Introduction& first, const Introduction& second,
               const std::map<Rank, const Introduction*>& all) {
  const bool sameVersion = first.libraryVersion == second.libraryVersion;
  const bool sameSize = first.groupSize == second.groupSize;
  if (sameVersion && sameSize && first.settings == second.settings) return;
  const std::string who = describe(first) + " and " + describe(second);
  if (!sameVersion) {
    raise(ErrorKind::Mismatch, "{} run smddp {} and {}; install the same version on all nodes", who,
          first.libraryVersion, second.libraryVersion);
  }
  if (!sameSize) {
    raise(
        ErrorKind::Mismatch,
        "{} expect groups of {} and {} ranks. Give all ranks the same WORLD_SIZE, and new_group() "
        "the same ranks",
        who, first.groupSize, second.groupSize);
  }
  raise(ErrorKind::Mismatch,
        "{} have different settings: {}. Give all ranks the same value, or none: check what the "
        "launcher hands on to the hosts",
        who, differences(all));
}

}  // namespace

Introduction introduceThisProcess(const Settings& settings, const ProcessId& id) {
  Introduction result;
  result.libraryVersion = SMDDP_VERSION;
  result.host = hostName();
  result.pid = ::getpid();
  result.processId = id;
  result.nodeName = nodeName(settings);
  result.settings = settingsToAgreeOn(settings);
  return result;
}

std::string listRanks(const std::vector<Rank>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += fmt::format("{}{}", i == 0 ? "" : ", ", ranks[i]);
    if (last > i) text += fmt::format("-{}", ranks[last]);
    i = last + 1;
  }
  return text;
}

std::string describe(const Introduction& introduction) {
  return describe(introduction.jobRank, introduction.host, introduction.pid);
}

std::string describeThisProcess(Rank jobRank) { return describe(jobRank, hostName(), ::getpid()); }

std::vector<std::byte> serialise(const Introduction& introduction) {
  BlobWriter writer;
  writer.number(kMagic);
  writer.number(kProtocolVersion);
  writer.text("libraryVersion", introduction.libraryVersion, kMaxVersionBytes);
  writer.number(static_cast<uint32_t>(introduction.groupSize));
  writer.text("host", introduction.host, kMaxHostBytes);
  writer.number(static_cast<uint32_t>(introduction.pid));
  writer.raw(introduction.processId);
  writer.text("nodeName", introduction.nodeName, kMaxNodeNameBytes);
  writer.number(introduction.nodeAgreement);
  writer.text("settings", introduction.settings, kMaxSettingsBytes);
  writer.bytes("slab", introduction.slab, kMaxOpaqueBytes);
  writer.bytes("fabric", introduction.fabric, kMaxOpaqueBytes);
  writer.bytes("lifeline", introduction.lifeline, kMaxOpaqueBytes);
  writer.bytes("group", introduction.group, kMaxOpaqueBytes);
  return writer.take();
}

Introduction parseIntroduction(std::span<const std::byte> blob, Rank jobRank) {
  try {
    BlobReader reader(blob);
    if (reader.number<uint32_t>("magic") != kMagic) throw BlobError("it begins with other bytes");
    const auto protocol = reader.number<uint32_t>("protocolVersion");
    const std::string version = reader.text("libraryVersion", kMaxVersionBytes);
    if (protocol != kProtocolVersion) {
      raise(ErrorKind::Mismatch,
            "rank {} runs smddp {} (protocol {}), this rank {} (protocol {}); install the same "
            "version "
            "on all nodes",
            jobRank, version, protocol, SMDDP_VERSION, kProtocolVersion);
    }
    Introduction result = parseFields(reader);
    result.libraryVersion = version;
    result.jobRank = jobRank;
    return result;
  } catch (const BlobError& error) {
    raise(ErrorKind::Transport,
          "what rank {} published in the store is not an introduction: {}; is another program "
          "using the "
          "same store and group name?",
          jobRank, error.what());
  }
}

void checkAgreement(const Introduction& first, const Introduction& second) {
  checkPair(first, second, {{first.jobRank, &first}, {second.jobRank, &second}});
}

void checkAgreement(const std::vector<Introduction>& introductions) {
  std::map<Rank, const Introduction*> all;
  for (const Introduction& one : introductions) all[one.jobRank] = &one;
  // Compare with rank 0 in the order of ranks, so that every rank finds the same pair.
  for (size_t rank = 1; rank < introductions.size(); ++rank) {
    checkPair(introductions.front(), introductions[rank], all);
  }
  std::map<ProcessId, const Introduction*> known;
  for (const Introduction& one : introductions) {
    const auto [first, isNew] = known.try_emplace(one.processId, &one);
    if (isNew) continue;
    raise(
        ErrorKind::Mismatch,
        "{} and {} say that they are the same process: was one forked from the other after it had "
        "used smddp, or has somebody copied keys in the store?",
        describe(*first->second), describe(one));
  }
}

}  // namespace smddp::bootstrap
