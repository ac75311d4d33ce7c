// Helpers for tests with real processes.
#pragma once

#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <string>
#include <type_traits>

#include <gtest/gtest.h>

#include "common/clock.h"

namespace smddp::transport::shm::testing {

inline constexpr Nanoseconds kSecond = 1'000'000'000;

// A forked process with a pipe in each direction. Fork before the test starts threads. The child's exit code
// is the return value of `body`, or 99 after an exception. The destructor kills and reaps the child.
class Child {
 public:
  // The child's end of the pipes.
  struct Line {
    int in;
    int out;
    template <typename T>
    void send(const T& value) const {
      static_assert(std::is_trivially_copyable_v<T>);
      if (write(out, &value, sizeof value) != static_cast<ssize_t>(sizeof value)) _exit(98);
    }
    // Ends the process if the other side is gone.
    template <typename T>
    T receive() const {
      T value;
      if (read(in, &value, sizeof value) != static_cast<ssize_t>(sizeof value)) _exit(97);
      return value;
    }
  };

  explicit Child(const std::function<int(const Line&)>& body) {
    std::array<int, 2> down{}, up{};
    if (pipe(down.data()) != 0 || pipe(up.data()) != 0) std::abort();
    pid_ = fork();
    if (pid_ == 0) {
      close(down[1]);
      close(up[0]);
      _exit(run(body, {down[0], up[1]}));
    }
    close(down[0]);
    close(up[1]);
    in_ = up[0];
    out_ = down[1];
  }

  ~Child() {
    if (!reaped_) {
      kill(SIGKILL);
      wait();
    }
    close(in_);
    close(out_);
  }

  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  void kill(int signal) const { ::kill(pid_, signal); }

  template <typename T>
  void send(const T& value) const {
    ASSERT_EQ(write(out_, &value, sizeof value), static_cast<ssize_t>(sizeof value));
  }

  // Fails the test if the child sends nothing for 60 s or ends first.
  template <typename T>
  T receive() const {
    T value{};
    pollfd file{in_, POLLIN, 0};
    EXPECT_EQ(poll(&file, 1, 60'000), 1) << "the child says nothing";
    EXPECT_EQ(read(in_, &value, sizeof value), static_cast<ssize_t>(sizeof value));
    return value;
  }

  // Returns the exit code, or minus the signal.
  int wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    reaped_ = true;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  static int run(const std::function<int(const Line&)>& body, const Line& line) {
    alarm(100);  // no child outlives its test
    try {
      return body(line);
    } catch (const std::exception& error) {
      fprintf(stderr, "child %d: %s\n", getpid(), error.what());
      return 99;
    }
  }

  pid_t pid_ = -1;
  int in_ = -1;
  int out_ = -1;
  bool reaped_ = false;
};

// Counts the files that have `part` in their names.
inline size_t countFiles(const char* folder, const char* part = "") {
  DIR* directory = opendir(folder);
  if (directory == nullptr) return 0;
  size_t count = 0;
  while (const dirent* entry = readdir(directory)) count += strstr(entry->d_name, part) != nullptr;
  closedir(directory);
  return count;
}

inline size_t openDescriptors() { return countFiles("/proc/self/fd"); }

// Waits until the condition is true; false if that takes more than 20 s.
inline bool eventually(const std::function<bool()>& condition) {
  const MonotonicClock clock;
  const Deadline deadline = Deadline::after(clock, 20 * kSecond);
  while (!condition()) {
    if (deadline.passed(clock)) return false;
    usleep(100);
  }
  return true;
}

}  // namespace smddp::transport::shm::testing
