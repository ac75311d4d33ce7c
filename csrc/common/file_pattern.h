// The value of a setting that names a file of each process: a path in which %h stands for the host's name, %p for the
// number of the process, %r for its rank, and %% for a percent sign. Empty: no file.
#pragma once

#include <optional>
#include <string>

namespace smddp {

struct FilePattern {
  std::string text;
  bool empty() const { return text.empty(); }
  // Whether "%r" (for 'r') is in it.
  bool names(char what) const;
  // Throws Usage if something else stands behind a percent sign. `setting` is named in the error.
  void check(const char* setting) const;
  // The path for this process; null if the rank is in it and is not known (negative). Of what check() has accepted.
  std::optional<std::string> path(int rank) const;
  friend bool operator==(const FilePattern&, const FilePattern&) = default;
};

// The name of this host, as hostname(1) prints it.
std::string hostName();

}  // namespace smddp
