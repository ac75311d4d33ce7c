#include "collectives/tuning.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <limits>
#include <optional>
#include <span>

#include "collectives/selection.h"
#include "common/fnv.h"

namespace smddp::collectives {
namespace {

constexpr std::string_view kHeader = "smddp-tuning 1";
// A longer file is not a tuning file.
constexpr size_t kMaxFileBytes = 1 << 20;
constexpr int kMaxNodes = 1 << 16;
constexpr int kMaxRanksOfNode = 1 << 12;
constexpr size_t kNumFields = 5;

// "tuning.txt:7"
std::string place(const std::string& origin, int line) {
  return fmt::format("{}:{}", origin, line);
}

std::vector<std::string_view> fieldsOf(std::string_view line) {
  line = line.substr(0, line.find('#'));
  std::vector<std::string_view> fields;
  constexpr std::string_view kBlanks = " \t\r";
  for (;;) {
    const size_t begin = line.find_first_not_of(kBlanks);
    if (begin == std::string_view::npos) return fields;
    line.remove_prefix(begin);
    const std::string_view field = line.substr(0, line.find_first_of(kBlanks));
    fields.push_back(field);
    line.remove_prefix(field.size());
  }
}

std::optional<int64_t> number(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

// Parses "2x4" or "3+1". Returns an empty vector for anything else.
std::vector<int> parseLayout(std::string_view text) {
  const size_t cross = text.find('x');
  if (cross != std::string_view::npos) {
    const auto nodes = number(text.substr(0, cross)), ranks = number(text.substr(cross + 1));
    if (!nodes || !ranks || *nodes > kMaxNodes || *ranks > kMaxRanksOfNode || *ranks < 1) return {};
    return std::vector<int>(static_cast<size_t>(*nodes), static_cast<int>(*ranks));
  }
  std::vector<int> sizes;
  for (;;) {
    const size_t plus = text.find('+');
    const auto ranks = number(text.substr(0, plus));
    if (!ranks || *ranks < 1 || *ranks > kMaxRanksOfNode || sizes.size() >= kMaxNodes) return {};
    sizes.push_back(static_cast<int>(*ranks));
    if (plus == std::string_view::npos) return sizes;
    text.remove_prefix(plus + 1);
  }
}

std::optional<Collective> collectiveCalled(std::string_view name) {
  for (int i = 0; i < kNumCollectives; ++i) {
    if (name == toString(static_cast<Collective>(i))) return static_cast<Collective>(i);
  }
  return std::nullopt;
}

// `where` is the row's file and line, for errors.
TuningRow parseRow(const std::vector<std::string_view>& fields, const std::string& where) {
  if (fields.size() != kNumFields) {
    raise(ErrorKind::Usage,
          "{}: a row has {} fields, not {}: collective, ranks, memory, bytes, algorithm, for "
          "example \"allreduce 2x2 private 32768 direct\"",
          where, kNumFields, fields.size());
  }
  TuningRow row;
  const auto collective = collectiveCalled(fields[0]);
  if (!collective) raise(ErrorKind::Usage, "{}: \"{}\" is not a collective", where, fields[0]);
  row.collective = *collective;
  row.ranksOfNodes = parseLayout(fields[1]);
  if (row.ranksOfNodes.empty()) {
    raise(ErrorKind::Usage, "{}: \"{}\" is not a layout of ranks; write it like 2x4 or 3+1", where,
          fields[1]);
  }
  const std::string_view memory = fields[2];
  if (memory != "private" && memory != "shared" && memory != "any") {
    raise(ErrorKind::Usage, "{}: \"{}\" is not a kind of memory; use private, shared or any", where,
          memory);
  }
  if (memory != "any" && row.ranksOfNodes.size() > 1) {
    raise(ErrorKind::Usage,
          "{}: between nodes the choice must not depend on memory; write any instead of {}", where,
          memory);
  }
  row.whenPrivate = memory != "shared";
  row.whenShared = memory != "private";
  const auto bytes = fields[3] == "max" ? std::numeric_limits<int64_t>::max() : number(fields[3]);
  if (!bytes) {
    raise(ErrorKind::Usage, "{}: \"{}\" is not a number of bytes; write digits only, or max", where,
          fields[3]);
  }
  row.maxBytes = *bytes;
  row.algorithm = fields[4];
  const auto known = algorithmsOf(row.collective);
  if (row.algorithm != kBuiltIn &&
      std::find(known.begin(), known.end(), row.algorithm) == known.end()) {
    std::string names;
    for (const std::string& name : known) names += name + ", ";
    names += kBuiltIn;
    raise(ErrorKind::Usage, "{}: {} has no algorithm \"{}\", only {}", where, fields[0], fields[4],
          names);
  }
  return row;
}

void add(Fnv1a& hash, std::string_view text) { hash.add(std::as_bytes(std::span(text))); }

}  // namespace

Tuning Tuning::parse(std::string_view text, const std::string& origin) {
  Tuning tuning;
  tuning.origin_ = origin;
  bool begun = false;
  for (int line = 1; !text.empty(); ++line) {
    const std::string_view content = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(content.size() + 1, text.size()));
    const auto fields = fieldsOf(content);
    if (fields.empty()) continue;
    const std::string where = place(origin, line);
    if (begun) {
      tuning.rows_.push_back(parseRow(fields, where));
      tuning.rows_.back().line = line;
    } else if (fields.size() == 2 && fmt::format("{} {}", fields[0], fields[1]) == kHeader) {
      begun = true;
    } else {
      raise(ErrorKind::Usage, "{}: a tuning file begins with \"{}\", not \"{}\"", where, kHeader,
            content.substr(0, 80));
    }
  }
  if (!begun) raise(ErrorKind::Usage, "{}: a tuning file begins with \"{}\"", origin, kHeader);
  return tuning;
}

Tuning Tuning::read(const std::string& path) {
  if (path.empty()) return {};
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    raise(ErrorKind::Usage,
          "SMDDP_TUNING_FILE={}: the file cannot be opened; unset it, or write one "
          "with `python -m smddp.bench --tune`",
          path);
  }
  std::string text(kMaxFileBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kMaxFileBytes) {
    raise(ErrorKind::Usage, "SMDDP_TUNING_FILE={}: more than {} bytes are not a tuning file", path,
          kMaxFileBytes);
  }
  // A folder can be opened, but not read.
  if (file.bad()) raise(ErrorKind::Usage, "SMDDP_TUNING_FILE={}: the file cannot be read", path);
  try {
    return parse(text, path);
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("SMDDP_TUNING_FILE: {}", error.what()));
  }
}

uint64_t Tuning::digest(std::string_view more) const {
  Fnv1a hash;
  add(hash, more);
  for (const TuningRow& row : rows_) {
    add(hash, fmt::format("\n{} {} {} {} {}", toString(row.collective), row.whenPrivate,
                          row.whenShared, row.maxBytes, row.algorithm));
    for (const int ranks : row.ranksOfNodes) add(hash, std::to_string(ranks) + '+');
  }
  return hash.digest();
}

bool isForLayout(const TuningRow& row, const plan::Topology& topology) {
  return std::equal(row.ranksOfNodes.begin(), row.ranksOfNodes.end(), topology.nodes().begin(),
                    topology.nodes().end(), [](int ranks, const std::vector<Rank>& node) {
                      return static_cast<size_t>(ranks) == node.size();
                    });
}

bool fits(const TuningRow& row, const plan::Topology& topology, const Shape& shape) {
  const bool rightMemory = shape.shared ? row.whenShared : row.whenPrivate;
  return row.collective == shape.collective && rightMemory && shape.bytes <= row.maxBytes &&
         isForLayout(row, topology);
}

}  // namespace smddp::collectives
