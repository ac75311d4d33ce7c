// Metrics as texts: for Prometheus (its text exposition format), and as JSON.
#pragma once

#include <string>

#include "engine/observe/metrics.h"

namespace smddp::engine::observe {

// The labels that all numbers of a process have.
struct MetricsOrigin {
  std::string host;
  int pid = 0;
  int rank = -1;         // in the default group; negative: not known
  double writtenAt = 0;  // seconds since 1970
};

// Everything that was counted since the process began.
std::string prometheusText(const MetricsOrigin& origin, const Metrics::Totals& totals);
// One line, with what was counted between two looks, `seconds` apart. Calls that did not happen are left out.
std::string jsonLine(const MetricsOrigin& origin, double seconds, const Metrics::Totals& before,
                     const Metrics::Totals& now);
// The duration, in seconds, that this part of the calls did not exceed, interpolated within its interval; 0 without
// calls.
double quantile(const Metrics::CallTotals& calls, double part);

}  // namespace smddp::engine::observe
