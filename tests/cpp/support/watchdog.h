// A watchdog: ends a test process that hangs, with a message.
#pragma once

#include <csignal>
#include <cstdlib>

#include <unistd.h>

#include "support/effort.h"

namespace smddp::test {

class Watchdog {
 public:
  explicit Watchdog(unsigned seconds = kSeconds) : seconds_(seconds) {
    std::signal(SIGALRM, [](int) {
      constexpr char kText[] = "a test hangs: ended by its watchdog\n";
      static_cast<void>(!write(STDERR_FILENO, kText, sizeof kText - 1));
      std::abort();
    });
    restart();
  }
  ~Watchdog() { alarm(0); }
  // For tests that make many steps: the time is that of one step.
  void restart() const { alarm(seconds_); }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  static constexpr unsigned kSeconds = kSanitized ? 150 : 60;
  const unsigned seconds_;
};

}  // namespace smddp::test
