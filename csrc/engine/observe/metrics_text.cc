#include "engine/observe/metrics_text.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <tuple>

#include <fmt/format.h>

namespace smddp::engine::observe {
namespace {

double seconds(Nanoseconds time) { return static_cast<double>(time) * 1e-9; }

// Puts a text in quotes, as both formats want it: names of groups may contain any character.
std::string inQuotes(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += {'\\', c};
    } else {
      // A control character is a blank: only JSON could write it.
      result += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return result + '"';
}

class Prometheus {
 public:
  explicit Prometheus(const MetricsOrigin& origin)
      : process_(fmt::format("rank=\"{}\",pid=\"{}\"",
                             origin.rank < 0 ? "" : std::to_string(origin.rank), origin.pid)) {}

  void family(std::string_view name, std::string_view type, std::string_view help) {
    name_ = name;
    text_ += fmt::format("# HELP {0} {1}\n# TYPE {0} {2}\n", name, help, type);
  }
  // A sample of the family; `labels` are those behind rank and pid.
  template <typename Value>
  void sample(std::string_view suffix, std::string_view labels, Value value) {
    text_ += fmt::format("{}{}{{{}{}{}}} {}\n", name_, suffix, process_, labels.empty() ? "" : ",",
                         labels, value);
  }
  std::string take() { return std::move(text_); }

 private:
  const std::string process_;
  std::string_view name_;
  std::string text_;
};

std::string labelsOf(const Metrics::CallTotals& calls) {
  return fmt::format("group={},collective={},algorithm={},size={}", inQuotes(calls.group),
                     inQuotes(calls.collective), inQuotes(calls.algorithm), inQuotes(calls.size));
}

bool isSame(const Metrics::CallTotals& a, const Metrics::CallTotals& b) {
  return std::tie(a.group, a.collective, a.algorithm, a.size) ==
         std::tie(b.group, b.collective, b.algorithm, b.size);
}

bool isSame(const Metrics::ErrorTotals& a, const Metrics::ErrorTotals& b) {
  return std::tie(a.group, a.collective, a.kind) == std::tie(b.group, b.collective, b.kind);
}

bool isSame(const Metrics::StallTotals& a, const Metrics::StallTotals& b) {
  return a.group == b.group;
}

// The totals of the same kind at the earlier look; none if there were none.
template <typename Totals>
Totals earlier(const std::vector<Totals>& all, const Totals& totals) {
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const Totals& t) { return isSame(t, totals); });
  return found == all.end() ? Totals{} : *found;
}

Metrics::CallTotals minus(Metrics::CallTotals now, const Metrics::CallTotals& before) {
  for (size_t i = 0; i < now.byDuration.size(); ++i) now.byDuration[i] -= before.byDuration[i];
  now.calls -= before.calls;
  now.duration -= before.duration;
  now.bytes -= before.bytes;
  now.wireBytes -= before.wireBytes;
  now.waited.node -= before.waited.node;
  now.waited.network -= before.waited.network;
  return now;
}

std::string jsonOf(const Metrics::CallTotals& calls) {
  return fmt::format(
      R"({{"group":{},"collective":{},"algorithm":{},"size":{},"calls":{},"bytes":{},"wire_bytes":{},)"
      R"("seconds":{:.9f},"p50_seconds":{:.9f},"p99_seconds":{:.9f},"node_wait_seconds":{:.9f},)"
      R"("network_wait_seconds":{:.9f}}})",
      inQuotes(calls.group), inQuotes(calls.collective), inQuotes(calls.algorithm),
      inQuotes(calls.size), calls.calls, calls.bytes, calls.wireBytes, seconds(calls.duration),
      quantile(calls, 0.5), quantile(calls, 0.99), seconds(calls.waited.node),
      seconds(calls.waited.network));
}

}  // namespace

double quantile(const Metrics::CallTotals& calls, double part) {
  const double wanted = part * static_cast<double>(calls.calls);
  double below = 0;
  for (size_t i = 0; i < calls.byDuration.size(); ++i) {
    const auto here = static_cast<double>(calls.byDuration[i]);
    if (here == 0 || below + here < wanted) {
      below += here;
      continue;
    }
    // Nothing is known of those beyond the last limit.
    if (i >= durations::kLimits) return seconds(durations::limit(durations::kLimits - 1));
    const double low = i == 0 ? 0 : seconds(durations::limit(i - 1));
    return low + (seconds(durations::limit(i)) - low) * (wanted - below) / here;
  }
  return 0;
}

std::string prometheusText(const MetricsOrigin& origin, const Metrics::Totals& totals) {
  Prometheus text(origin);
  text.family("smddp_call_duration_seconds", "histogram",
              "How long calls took, from their submission to their end on this rank.");
  for (const auto& calls : totals.calls) {
    const std::string labels = labelsOf(calls);
    uint64_t below = 0;
    for (size_t i = 0; i < durations::kLimits; ++i) {
      below += calls.byDuration[i];
      text.sample("_bucket", fmt::format("{},le=\"{}\"", labels, seconds(durations::limit(i))),
                  below);
    }
    text.sample("_bucket", labels + ",le=\"+Inf\"", calls.calls);
    text.sample("_sum", labels, seconds(calls.duration));
    text.sample("_count", labels, calls.calls);
  }
  text.family("smddp_bytes_total", "counter",
              "Bytes of the vectors of calls; with one block per rank, of one block.");
  for (const auto& calls : totals.calls) text.sample("", labelsOf(calls), calls.bytes);
  text.family("smddp_wire_bytes_total", "counter",
              "Bytes that this rank sent to other nodes, without headers.");
  for (const auto& calls : totals.calls) text.sample("", labelsOf(calls), calls.wireBytes);
  text.family("smddp_node_wait_seconds_total", "counter",
              "How long this rank waited for the last rank of its node to make the call.");
  for (const auto& calls : totals.calls)
    text.sample("", labelsOf(calls), seconds(calls.waited.node));
  text.family("smddp_network_wait_seconds_total", "counter",
              "How long this rank then waited for the first data of another node.");
  for (const auto& calls : totals.calls)
    text.sample("", labelsOf(calls), seconds(calls.waited.network));
  text.family("smddp_errors_total", "counter", "Calls that ended with an error.");
  for (const auto& errors : totals.errors) {
    text.sample("",
                fmt::format("group={},collective={},kind={}", inQuotes(errors.group),
                            inQuotes(errors.collective), inQuotes(errors.kind)),
                errors.count);
  }
  text.family("smddp_stalls_total", "counter",
              "Calls that waited for so long that the log says for whom.");
  for (const auto& stalls : totals.stalls) {
    text.sample("", fmt::format("group={}", inQuotes(stalls.group)), stalls.count);
  }
  text.family("smddp_written_timestamp_seconds", "gauge", "When this file was written.");
  text.sample("", "", fmt::format("{:.3f}", origin.writtenAt));
  return text.take();
}

std::string jsonLine(const MetricsOrigin& origin, double duration, const Metrics::Totals& before,
                     const Metrics::Totals& now) {
  std::string calls, errors, stalls;
  const auto append = [](std::string& list, const std::string& item) {
    list += list.empty() ? item : "," + item;
  };
  for (const auto& totals : now.calls) {
    const auto fresh = minus(totals, earlier(before.calls, totals));
    if (fresh.calls > 0) append(calls, jsonOf(fresh));
  }
  for (const auto& totals : now.errors) {
    const uint64_t fresh = totals.count - earlier(before.errors, totals).count;
    if (fresh == 0) continue;
    append(errors, fmt::format(R"({{"group":{},"collective":{},"kind":{},"count":{}}})",
                               inQuotes(totals.group), inQuotes(totals.collective),
                               inQuotes(totals.kind), fresh));
  }
  for (const auto& totals : now.stalls) {
    const uint64_t fresh = totals.count - earlier(before.stalls, totals).count;
    if (fresh == 0) continue;
    append(stalls, fmt::format(R"({{"group":{},"count":{}}})", inQuotes(totals.group), fresh));
  }
  return fmt::format(
      R"({{"time":{:.3f},"interval_seconds":{:.3f},"host":{},"pid":{},"rank":{},"calls":[{}],"errors":[{}],)"
      R"("stalls":[{}]}})"
      "\n",
      origin.writtenAt, duration, inQuotes(origin.host), origin.pid,
      origin.rank < 0 ? "null" : std::to_string(origin.rank), calls, errors, stalls);
}

}  // namespace smddp::engine::observe
