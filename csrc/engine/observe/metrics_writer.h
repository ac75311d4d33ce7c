// Writes Metrics to the files of SMDDP_METRICS, from a thread of its own: at each interval, when a group has ended, and
// at the end. The file for Prometheus is replaced as a whole, so nobody reads half of it.
//
// Threads: any. No other thread ever waits for a file: stop() gives up after some seconds, and leaves the thread behind
// if a file system does not answer. Ends with stop(), or in the child of a fork, which does not have the thread, with
// forget(). Errors: the first that happens when a file is written is one line in the log; writing is tried again at the
// next interval.
#pragma once

#include <memory>
#include <thread>

#include "common/config.h"
#include "engine/observe/metrics.h"

namespace smddp::engine::observe {

class MetricsWriter {
 public:
  // The counters of a process with these settings; null if it counts nothing (SMDDP_METRICS). Throws Usage if ranks
  // would write to the same file.
  static std::shared_ptr<Metrics> metricsFor(const Settings& settings);

  MetricsWriter(std::shared_ptr<const Metrics> metrics, const Settings& settings);
  ~MetricsWriter() { stop(); }
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  // Writes now, without waiting for it.
  void writeSoon();
  // Writes for the last time, and ends the thread. Idempotent.
  void stop();
  void forget();

 private:
  struct State;

  const std::shared_ptr<State> state_;  // also the thread's, which may outlive this
  std::thread thread_;
};

}  // namespace smddp::engine::observe
