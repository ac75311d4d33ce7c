// All settings of the library, in two tables: for users, and for experts. Nothing else reads the environment.
//
// A line is  X(type, field, "ENVIRONMENT", default, "what it does; when to change it"). The allowed values may follow:
// for a number least, most, "unit"; for a text .words = "…". docs and `smddp env` are generated from the tables. A text
// that does not parse is a Usage error that names the variable and the text.
//
// settings() reads the environment once, so no setting of a process ever changes. The entrances of the library call it
// (process_group, c_interface, bindings); the engine and the transports take a Settings value.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/file_pattern.h"

namespace smddp {

// A setting that is never printed.
struct Secret {
  std::string text;
  friend bool operator==(const Secret&, const Secret&) = default;
};

// The allowed values of a setting: the range of a number, whose lower end leaves room for any plan and message, or the
// words of a text, as the end of a sentence: "this, that or something else". Empty: any text.
struct Allowed {
  int64_t least = 0, most = 0;
  const char* unit = "";
  std::string_view words = "";
};
// More than the memory of any machine; sums of several such sizes still fit into their type.
inline constexpr int64_t kMostBytes = int64_t{1} << 40;
// Operations and messages are identified by numbers of 8 and of 15 bits (asserted in engine/plans/channels.cc).
inline constexpr int64_t kMostInFlight = 254;
inline constexpr int64_t kMostWindow = 1 << 8;

// clang-format off
#define SMDDP_USER_SETTINGS(X)                                                                                 \
  X(std::string, nodeId, "SMDDP_NODE_ID", "",                                                                  \
    "Name of the node that this rank runs on. Ranks with different names never share memory. Set it to let "   \
    "one machine play several nodes. Default: the ranks compare the kernel's boot id and check that they can " \
    "share memory.")                                                                                           \
  X(std::string, provider, "SMDDP_PROVIDER", "",                                                               \
    "What carries data between nodes, the same on all ranks: sockets, the kernel's TCP; or a provider of "     \
    "libfabric: efa, cxi, verbs;ofi_rxm, tcp, net, tcp;ofi_rxm or shm. If that is missing, it is an error. "   \
    "Default: the first of efa, cxi and verbs that the machine has a card for, else sockets.")                 \
  X(std::string, interface, "SMDDP_INTERFACE", "",                                                             \
    "Network interface between nodes, such as eth0. Default: the interface that routes to MASTER_ADDR.")       \
  X(std::string, congestionControl, "SMDDP_CONGESTION_CONTROL", "auto",                                        \
    "Congestion control of TCP sockets between nodes. auto: what the system has; but cubic, or else reno, if " \
    "the kernel allows it, where the system has BBR, a round trip takes up to 3 ms and few packets are lost. " \
    "system: what the system has. Or a name; where the kernel does not allow it, the log and "                 \
    "smddp.describe() say so, and connections keep what the system has. The sockets of libfabric and NCCL "    \
    "always keep it.",                                                                                         \
    .words = "auto, system, cubic, reno, bbr or dctcp")                                                        \
  X(int64_t, hostTimeout, "SMDDP_HOST_TIMEOUT", 4,                                                             \
    "A rank that waits for a rank on another host gives it up when that host answers nothing for so long. "    \
    "The log has it after one second. A switch or a bond takes 1 to 2 s to change over; the default is twice " \
    "that. Raise it if your network is interrupted for longer.",                                               \
    1, 86400, "seconds")                                                                                       \
  X(Secret, jobToken, "SMDDP_JOB_TOKEN", {},                                                                   \
    "Secret of the job, the same on all ranks. With it the ranks sign what they write about themselves to "    \
    "the store and to their lifelines, and prove in every message between nodes that they have it. So a "      \
    "process without the token cannot join the job, and no rank reads a message of it. Nothing is encrypted. " \
    "At least 16 characters, for example from `openssl rand -hex 16`. See docs/security.md.")                  \
  X(std::string, log, "SMDDP_LOG", "warn",                                                                     \
    "How much to print: error, warn, info (one line about the choices made), debug or trace.",                 \
    .words = "error, warn, info, debug or trace")                                                              \
  X(FilePattern, logFile, "SMDDP_LOG_FILE", {},                                                                \
    "File to which a process appends what it prints, such as /tmp/smddp-%h-%r.log: %h is the host, %p the "    \
    "process, %r the rank, %% a percent sign. Its folder must exist. Default: standard error.")                \
  X(FilePattern, metrics, "SMDDP_METRICS", {},                                                                 \
    "Beginning of the names of two files in which a process counts its calls, such as /tmp/smddp-%h-%r, with " \
    "the letters of SMDDP_LOG_FILE; %p or %r must be among them. It appends a line of JSON for each interval " \
    "to the file with .jsonl behind, and writes totals for Prometheus to the one with .prom behind. Default: " \
    "nothing is counted. See docs/observing.md.")                                                              \
  X(int64_t, metricsSeconds, "SMDDP_METRICS_SECONDS", 10,                                                      \
    "How often the files of SMDDP_METRICS are written.",                                                       \
    1, 86400, "seconds")                                                                                       \
  X(int64_t, dumpSeconds, "SMDDP_DUMP_SECONDS", 20,                                                            \
    "How long the end of a group or of a process that has failed waits for what torch's tools write about it, " \
    "such as the dump of the Flight Recorder. torchrun kills a process 30 s after it has asked it to end. 0: "  \
    "torch's tools are not told of a failure.",                                                                \
    0, 86400, "seconds")                                                                                       \
  X(std::string, insteadOf, "SMDDP_INSTEAD_OF", "",                                                            \
    "Backends whose place smddp takes on the CPU, in scripts that ask for one of them: gloo, mpi, or both "    \
    "joined by a comma. gloo also stands for no name, which means gloo there. See docs/frameworks.md.")        \
  X(std::string, algorithm, "SMDDP_ALGORITHM", "",                                                             \
    "Overrides the choice of algorithms, as collective=name[,...], for example allreduce=ring. Give all "      \
    "ranks the same value. `smddp plan list` prints the names.")                                               \
  X(std::string, wire, "SMDDP_WIRE", "fp32",                                                                   \
    "How sums and averages of float32 travel between nodes: fp32, as they are; bf16, half the bytes; int8, a "  \
    "quarter; auto, the one that suits the network, which is measured when a group is made. With +feedback "   \
    "behind (int8+feedback), what rounding loses is added to the next sum of the same tensor. Give all ranks " \
    "the same value. See docs/wire.md.",                                                                       \
    .words = "fp32, bf16, int8, auto, bf16+feedback, int8+feedback or auto+feedback")                         \
  X(std::string, tuningFile, "SMDDP_TUNING_FILE", "",                                                          \
    "File with the fastest algorithms measured, as `python -m smddp.bench --tune` writes it; the same rows "   \
    "on all ranks. SMDDP_ALGORITHM overrides the file, and the file overrides the built-in table.")            \
  X(bool, commMemory, "SMDDP_COMM_MEMORY", true,                                                               \
    "Allocate DDP's gradient buckets in memory that the ranks of a node share, so that they need no staging.") \
  X(std::string, gpuPath, "SMDDP_GPU_PATH", "auto",                                                            \
    "How calls on GPU tensors run, the same on all ranks. auto: NCCL if each rank has a GPU of its own and "   \
    "all are on one node, else through host memory. host: through host memory. nccl: NCCL. ipc: as auto, but " \
    "ranks that all share one GPU exchange data in its memory. rails: as auto, but on several nodes "          \
    "all_reduce, all_gather, reduce_scatter and broadcast use NCCL inside each node. docs/gpu.md says what "    \
    "has run on a GPU.",                                                                                       \
    .words = "auto, host, nccl, ipc or rails")                                                                 \
  X(bool, gpuCommMemory, "SMDDP_GPU_COMM_MEMORY", false,                                                       \
    "Allocate DDP's gradient buckets on GPUs, and FSDP2's buffers if it asks for them, in memory that is "     \
    "registered with NCCL, or that ranks which share a GPU can map.")                                          \
  X(bool, gpuDirect, "SMDDP_GPU_DIRECT", false,                                                                \
    "Send to other nodes directly from GPU memory, if libfabric's provider can do so (FI_HMEM) and nothing "   \
    "is reduced on the way; see docs/gpu.md. Has not run on a card that can.")                                 \
  X(int64_t, poolBytes, "SMDDP_POOL_BYTES", 8388608,                                                           \
    "Shared staging memory of one rank for one operation of one group. The system allocates a page when it "   \
    "is first used.",                                                                                          \
    16384, kMostBytes, "bytes")

// A user does not need these: their defaults were measured, and are good on other machines, too.
#define SMDDP_EXPERT_SETTINGS(X)                                                                               \
  X(bool, fabricRma, "SMDDP_FABRIC_RMA", true,                                                                 \
    "Use remote writes if the provider has them; 0: send messages to posted receives instead.")                \
  X(std::string, simd, "SMDDP_SIMD", "auto",                                                                   \
    "Instruction set of the reduction kernels: auto, scalar, avx2 or avx512. Results do not depend on it.",    \
    .words = "auto, scalar, avx2 or avx512")                                                                   \
  X(int64_t, oneShotBytes, "SMDDP_ONE_SHOT_BYTES", 131072,                                                     \
    "Inside a node, each rank sums whole vectors itself, with one synchronisation, if the bytes that it then " \
    "reads from others are at most this: allreduces of 128 KiB on 2 ranks, of 18 KiB on 8 ranks.",             \
    0, kMostBytes, "bytes")                                                                                    \
  X(int64_t, chunkBytes, "SMDDP_CHUNK_BYTES", 262144,                                                          \
    "Bytes of the vector that are staged at a time inside a node. A chunk should fit into the L2 cache.",      \
    64, kMostBytes, "bytes")                                                                                   \
  X(std::string, stagingStores, "SMDDP_STAGING_STORES", "auto",                                                \
    "How a rank writes staging memory that another rank of its node reads next: ordinary (through the "        \
    "caches), streaming (past the caches, to memory), or auto: smddp measures all the time which of them "     \
    "takes the writer less time.",                                                                             \
    .words = "auto, ordinary or streaming")                                                                    \
  X(int64_t, fabricChunkBytes, "SMDDP_FABRIC_CHUNK_BYTES", 1048576,                                            \
    "Bytes of the vector that are sent to another node at a time. The stages of different chunks overlap.",    \
    64, kMostBytes, "bytes")                                                                                   \
  X(int64_t, fabricWindow, "SMDDP_FABRIC_WINDOW", 4,                                                           \
    "Messages that a rank may send to another one on one channel before the receiver has consumed any "        \
    "(credit).",                                                                                               \
    1, kMostWindow, "messages")                                                                                \
  X(int64_t, inFlight, "SMDDP_IN_FLIGHT", 0,                                                                   \
    "Operations of one group that may run at the same time. 0: one on a single node, four with several "       \
    "nodes.",                                                                                                  \
    0, kMostInFlight, "operations")                                                                            \
  X(int64_t, fusionBytes, "SMDDP_FUSION_BYTES", 32768,                                                         \
    "Allreduces of one group that wait to start are fused, up to this many bytes together. 0: no fusion.",     \
    0, kMostBytes, "bytes")                                                                                    \
  X(int64_t, planCacheBytes, "SMDDP_PLAN_CACHE_BYTES", 4194304,                                                \
    "Plans that a group keeps for calls of the same kind and size; those that were not used for the longest "  \
    "time are dropped first. Most plans take 1 to 20 KiB.",                                                    \
    0, kMostBytes, "bytes")                                                                                    \
  X(int64_t, commMemoryCacheBytes, "SMDDP_COMM_MEMORY_CACHE_BYTES", 268435456,                                 \
    "Freed communication memory that is kept for reuse. What exceeds it is returned to the system.",           \
    0, kMostBytes, "bytes")
// clang-format on
#define SMDDP_SETTINGS(X) SMDDP_USER_SETTINGS(X) SMDDP_EXPERT_SETTINGS(X)

struct Settings {
#define SMDDP_FIELD(type, field, env, value, ...) type field = value;
  SMDDP_SETTINGS(SMDDP_FIELD)
#undef SMDDP_FIELD
};

// Parsed on the first call (thread-safe). Throws Usage on every call if a variable does not parse.
const Settings& settings();

struct SettingRow {
  std::string name, type, value, defaultValue, doc;
  bool fromEnvironment;
  bool isExpert;
};
// One row per line of the tables, with the present value and whether it comes from the environment.
std::vector<SettingRow> describeSettings();
// Unlike the others it does not read the environment, which may be wrong.
std::vector<std::string> settingNames();

// The text of a value, as in the environment. Secrets are not printed.
std::string print(const std::string& value);
std::string print(const Secret& value);
std::string print(const FilePattern& value);
std::string print(bool value);
std::string print(int64_t value);

// A variable of the launcher (RANK, SMDDP_*, MASTER_ADDR, …); empty if unset.
std::string environment(const char* name);

}  // namespace smddp
