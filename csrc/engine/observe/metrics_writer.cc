#include "engine/observe/metrics_writer.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <optional>
#include <system_error>

#include "common/error.h"
#include "common/file_descriptor.h"
#include "common/log.h"
#include "common/mutex.h"
#include "engine/observe/metrics_text.h"

namespace smddp::engine::observe {
namespace {

using SteadyClock = std::chrono::steady_clock;

// stop() waits so long for a file system.
constexpr auto kLastWrite = std::chrono::seconds(2);

// Returns why not, or 0.
int write(const std::string& path, int flags, const std::string& text) {
  const FileDescriptor file(::open(path.c_str(), flags | O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
  if (file.get() < 0) return errno;
  for (size_t done = 0; done < text.size();) {
    const auto written = ::write(file.get(), text.data() + done, text.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    done += static_cast<size_t>(written);
  }
  return 0;
}

int replace(const std::string& path, const std::string& text) {
  // Not "….prom": whoever collects the files does not see it.
  const std::string fresh = path + ".new";
  int reason = write(fresh, O_TRUNC, text);
  if (reason == 0 && std::rename(fresh.c_str(), path.c_str()) != 0) reason = errno;
  if (reason != 0) ::unlink(fresh.c_str());
  return reason;
}

}  // namespace

struct MetricsWriter::State {
  State(std::shared_ptr<const Metrics> counted, const Settings& settings)
      : metrics(std::move(counted)), pattern(settings.metrics), interval(settings.metricsSeconds) {}

  // The thread.
  void loop();
  void write();
  void report(const std::string& path, int reason);

  const std::shared_ptr<const Metrics> metrics;
  const FilePattern pattern;
  const std::chrono::seconds interval;
  Mutex mutex;
  ConditionVariable changed;
  bool isDue SMDDP_GUARDED_BY(mutex) = false;
  bool isStopping SMDDP_GUARDED_BY(mutex) = false;
  bool hasEnded SMDDP_GUARDED_BY(mutex) = false;

  // Only the thread uses these.
  SteadyClock::time_point writtenAt = SteadyClock::now();
  Metrics::Totals before;  // the totals of the last line of JSON; `lineAt` is when that was
  SteadyClock::time_point lineAt = writtenAt;
  bool isReported = false;
};

std::shared_ptr<Metrics> MetricsWriter::metricsFor(const Settings& settings) {
  const FilePattern& pattern = settings.metrics;
  if (pattern.empty()) return nullptr;
  if (!pattern.names('p') && !pattern.names('r')) {
    raise(ErrorKind::Usage,
          "SMDDP_METRICS={}: the ranks of a host would write to the same file; add %r (rank) or %p "
          "(process) to the name",
          pattern.text);
  }
  return std::make_shared<Metrics>();
}

MetricsWriter::MetricsWriter(std::shared_ptr<const Metrics> metrics, const Settings& settings)
    : state_(std::make_shared<State>(std::move(metrics), settings)) {
  try {
    thread_ = std::thread([state = state_] { state->loop(); });
  } catch (const std::system_error& error) {
    SMDDP_LOG(Warn, "engine", "there is no thread for SMDDP_METRICS, so nothing is written: {}",
              error.what());
  }
}

void MetricsWriter::writeSoon() {
  const MutexLock lock(state_->mutex);
  state_->isDue = true;
  state_->changed.notifyAll();
}

void MetricsWriter::stop() {
  if (!thread_.joinable()) return;
  bool hasEnded = false;
  {
    const auto limit = SteadyClock::now() + kLastWrite;
    MutexLock lock(state_->mutex);
    state_->isStopping = true;
    state_->changed.notifyAll();
    while (!state_->hasEnded && SteadyClock::now() < limit) state_->changed.waitUntil(lock, limit);
    hasEnded = state_->hasEnded;
  }
  if (hasEnded) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

void MetricsWriter::forget() {
  if (thread_.joinable()) thread_.detach();
}

void MetricsWriter::State::loop() {
  pthread_setname_np(pthread_self(), "smddp-metrics");
  for (bool isLast = false; !isLast;) {
    {
      const auto next = writtenAt + interval;
      MutexLock lock(mutex);
      while (!isStopping && !isDue && SteadyClock::now() < next) changed.waitUntil(lock, next);
      isDue = false;
      isLast = isStopping;
    }
    write();
  }
  const MutexLock lock(mutex);
  hasEnded = true;
  changed.notifyAll();
}

void MetricsWriter::State::write() {
  const int rank = processRank();
  const auto path = pattern.path(rank);
  writtenAt = SteadyClock::now();
  // A process without a rank has made no call.
  if (!path) return;
  const auto sinceEpoch = std::chrono::system_clock::now().time_since_epoch();
  const MetricsOrigin origin{.host = hostName(),
                             .pid = getpid(),
                             .rank = rank,
                             .writtenAt = std::chrono::duration<double>(sinceEpoch).count()};
  Metrics::Totals totals = metrics->totals();
  const std::string lines = *path + ".jsonl", snapshot = *path + ".prom";
  report(snapshot, replace(snapshot, prometheusText(origin, totals)));
  const double seconds = std::chrono::duration<double>(writtenAt - lineAt).count();
  const int failed = observe::write(lines, O_APPEND, jsonLine(origin, seconds, before, totals));
  report(lines, failed);
  // The next line will have what could not be written.
  if (failed != 0) return;
  before = std::move(totals);
  lineAt = writtenAt;
}

void MetricsWriter::State::report(const std::string& path, int reason) {
  if (reason == 0 || isReported) return;
  isReported = true;
  SMDDP_LOG(Warn, "engine", "cannot write {} ({}), which SMDDP_METRICS={} names: training goes on",
            path, std::generic_category().message(reason), pattern.text);
}

}  // namespace smddp::engine::observe
