#include "process_group/flight_recorder.h"

#if SMDDP_TORCH_VERSION_MINOR >= 15
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/FlightRecorder.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <system_error>
#include <typeinfo>

#include "common/log.h"

namespace smddp::process_group {
namespace {

std::atomic<int> written{0};  // files

// Writes the file that torch's own writer would, under another name first. Readers look for names that begin with that
// of the file, so the other one begins with a dot.
class WholeFiles final : public c10d::DebugInfoWriter {
 public:
  explicit WholeFiles(const DebugInfoWriter& torchs) : DebugInfoWriter(torchs) {}

  void write(const std::string& trace) override {
    const std::filesystem::path target =
        enable_dynamic_filename_ ? c10d::getCvarString({"TORCH_FR_DUMP_TEMP_FILE"}, "") : filename_;
    const auto part = target.parent_path() / fmt::format(".{}.{}.{}", target.filename().string(),
                                                         ::getpid(), written.fetch_add(1));
    std::ofstream file(part, std::ios::binary);
    file.write(trace.data(), static_cast<std::streamsize>(trace.size()));
    file.close();
    if (file && std::rename(part.c_str(), target.c_str()) == 0) return;
    const int reason = errno;
    ::unlink(part.c_str());
    SMDDP_LOG(Warn, "process_group", "cannot write the Flight Recorder's file {}: {}",
              target.string(), std::generic_category().message(reason));
  }
};

struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Leaves the writer of a program that has its own.
void writeWholeFiles() {
  // The rank is in the file's name. If there is no writer yet, getWriter() makes one, and takes it for that of a
  // program: it would warn that it is replaced.
  const c10d::DebugInfoWriter& writer = c10d::DebugInfoWriter::getWriter(processRank());
  if (typeid(writer) != typeid(c10d::DebugInfoWriter)) return;
  Silent silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  c10d::DebugInfoWriter::registerWriter(std::make_unique<WholeFiles>(writer));
}

void dump(bool hasStacks) {
  if (!c10d::getCvarBool(c10d::TORCH_FR_DUMP_ON_TIMEOUT, true)) return;
  try {
    writeWholeFiles();
    c10d::try_dump_fr_trace_file(/*includeCollectives=*/true, hasStacks,
                                 c10d::getCvarBool(c10d::TORCH_INCLUDE_ONLY_ACTIVE, false),
                                 "smddp");
  } catch (const std::exception& error) {
    SMDDP_LOG(Warn, "process_group", "the Flight Recorder writes nothing: {}", error.what());
  }
}

}  // namespace

void dumpWithoutStacks() {
  static std::atomic<bool> isDone{false};
  if (!isDone.exchange(true)) dump(false);
}

void dumpWithStacks() {
  // The first file is that without stacks. There is none if the recorder is off, or a program writes the files itself.
  if (written.load() == 1 && c10d::getCvarBool(c10d::TORCH_INCLUDE_STACK_TRACE, true)) dump(true);
}

}  // namespace smddp::process_group
#else
namespace smddp::process_group {

void dumpWithoutStacks() {}
void dumpWithStacks() {}

}  // namespace smddp::process_group
#endif
