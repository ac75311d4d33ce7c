#include "cuda/share.h"

#include <algorithm>
#include <numeric>

namespace smddp::cuda {
namespace {

// Shares begin at multiples of it: so accesses are aligned, and no two ranks write to one cache line of the GPU.
constexpr uint64_t kShareBytes = 128;

// The form of a collective.
struct Kind {
  bool rootSends;     // only the root has an input
  bool rootReceives;  // only the root has an output
  bool blocksOut;     // the input has a block for each receiver; else each receiver gets all of it
  bool blocksIn;      // the output has a block of each sender; else one place for all
  bool reduces;       // the inputs are reduced
};

constexpr Kind kindOf(Operation operation) {
  switch (operation) {
    case Operation::AllReduce: return {false, false, false, false, true};
    case Operation::Reduce: return {false, true, false, false, true};
    case Operation::ReduceScatter: return {false, false, true, false, true};
    case Operation::AllGather: return {false, false, false, true, false};
    case Operation::Gather: return {false, true, false, true, false};
    case Operation::Broadcast: return {true, false, false, false, false};
    case Operation::Scatter: return {true, false, true, false, false};
    case Operation::AllToAll: return {false, false, true, true, false};
  }
  return {};
}
Kind kindOf(const Call& call) { return kindOf(call.operation); }

bool sends(const Call& call, size_t rank) {
  return !kindOf(call).rootSends || rank == static_cast<size_t>(call.root);
}
bool receives(const Call& call, size_t rank) {
  return !kindOf(call).rootReceives || rank == static_cast<size_t>(call.root);
}

uint64_t sumOfFirst(const std::array<uint64_t, kMaxSharing>& blocks, size_t count) {
  return std::accumulate(blocks.begin(), blocks.begin() + count, uint64_t{0});
}

// Where the bytes that a rank sends to another one, or receives from it, begin in its tensor.
struct Block {
  uint64_t at, bytes;
};
Block blockTo(const Call& call, const Splits& ofSender, size_t receiver) {
  if (call.operation == Operation::AllToAll) {
    return {sumOfFirst(ofSender.to, receiver), ofSender.to[receiver]};
  }
  return {kindOf(call).blocksOut ? receiver * call.bytes : 0, call.bytes};
}
Block blockFrom(const Call& call, const Splits& ofReceiver, size_t sender) {
  if (call.operation == Operation::AllToAll) {
    return {sumOfFirst(ofReceiver.from, sender), ofReceiver.from[sender]};
  }
  return {kindOf(call).blocksIn ? sender * call.bytes : 0, call.bytes};
}

Job copyOf(uint64_t bytes) {
  Job job;
  job.type = DataType::uint8;
  job.count = bytes;
  return job;
}

// A job of so many bytes of elements.
Job jobOf(const Call& call, uint64_t bytes) {
  if (!kindOf(call).reduces) return copyOf(bytes);
  Job job;
  job.type = call.type;
  job.op = call.op;
  job.count = bytes / sizeOf(call.type);
  job.pre = call.op == ReduceOp::PREMUL_SUM;
  job.post = call.op == ReduceOp::AVG;
  if (job.pre) job.factor = call.factor;
  if (job.post) job.divisor = call.size;
  return job;
}

void addSource(Job& job, const std::byte* source) { job.srcs[job.numSrcs++] = source; }
void addDestination(Job& job, std::byte* destination) { job.dsts[job.numDsts++] = destination; }

void addCopy(std::vector<Job>& jobs, const std::byte* from, std::byte* to, uint64_t bytes) {
  Job job = copyOf(bytes);
  addSource(job, from);
  addDestination(job, to);
  jobs.push_back(job);
}

struct Range {
  uint64_t begin, end;
  uint64_t bytes() const { return end - begin; }
};

// The share of the vector that this rank reduces.
Range shareOf(const Call& call) {
  const auto size = static_cast<uint64_t>(call.size), me = static_cast<uint64_t>(call.me);
  const uint64_t even = (call.bytes + size - 1) / size;
  const uint64_t share = (even + kShareBytes - 1) / kShareBytes * kShareBytes;
  return {std::min(call.bytes, me * share), std::min(call.bytes, (me + 1) * share)};
}

uint64_t pieceBytes(const Call& call, uint64_t half) {
  return kindOf(call).blocksOut ? half / static_cast<uint64_t>(call.size) : half;
}

// The bytes of a piece of a vector, or a block: the last piece may be shorter.
Range pieceOf(const Call& call, int64_t piece, uint64_t half, uint64_t bytes) {
  const uint64_t each = pieceBytes(call, half), begin = static_cast<uint64_t>(piece) * each;
  return {std::min(bytes, begin), std::min(bytes, begin + each)};
}

// Where the piece for a rank lies in the sender's workspace.
std::byte* placeOf(const Call& call, std::byte* workspace, int64_t piece, uint64_t half,
                   size_t receiver) {
  const uint64_t block = kindOf(call).blocksOut ? receiver * pieceBytes(call, half) : 0;
  return workspace + static_cast<uint64_t>(piece % 2) * half + block;
}

void stage(std::vector<Job>& jobs, const Call& call, int64_t piece, uint64_t half,
           const Buffers& mine, std::byte* workspace) {
  if (!sends(call, static_cast<size_t>(call.me))) return;
  // A vector that goes to all ranks as a whole is staged once.
  const auto count = kindOf(call).blocksOut ? static_cast<size_t>(call.size) : 1;
  for (size_t receiver = 0; receiver < count; ++receiver) {
    const Block block = blockTo(call, mine.splits, receiver);
    const Range range = pieceOf(call, piece, half, block.bytes);
    addCopy(jobs, mine.input + block.at + range.begin,
            placeOf(call, workspace, piece, half, receiver), range.bytes());
  }
}

void take(std::vector<Job>& jobs, const Call& call, int64_t piece, uint64_t half,
          const Buffers& mine, const std::vector<std::byte*>& workspaces) {
  const auto me = static_cast<size_t>(call.me);
  if (!receives(call, me)) return;
  if (kindOf(call).reduces) {
    const Range range = pieceOf(call, piece, half, call.bytes);
    Job job = jobOf(call, range.bytes());
    for (std::byte* workspace : workspaces) {
      addSource(job, placeOf(call, workspace, piece, half, me));
    }
    addDestination(job, mine.output + range.begin);
    jobs.push_back(job);
    return;
  }
  for (size_t sender = 0; sender < workspaces.size(); ++sender) {
    if (!sends(call, sender)) continue;
    const Block block = blockFrom(call, mine.splits, sender);
    std::byte* const into = mine.output + block.at;
    if (sender == me && into == mine.input + blockTo(call, mine.splits, me).at)
      continue;  // in place
    const Range range = pieceOf(call, piece, half, block.bytes);
    addCopy(jobs, placeOf(call, workspaces[sender], piece, half, me), into + range.begin,
            range.bytes());
  }
}

void dropEmpty(std::vector<Job>& jobs) {
  std::erase_if(jobs, [](const Job& job) { return job.count == 0 || job.numDsts == 0; });
}

}  // namespace

std::vector<Job> directJobs(const Call& call, const std::vector<Buffers>& all) {
  const auto me = static_cast<size_t>(call.me);
  const Kind kind = kindOf(call);
  std::vector<Job> jobs;
  if (kind.reduces && !kind.blocksOut) {
    // Every rank reduces its share, for all ranks.
    const Range share = shareOf(call);
    Job job = jobOf(call, share.bytes());
    for (size_t rank = 0; rank < all.size(); ++rank) {
      addSource(job, all[rank].input + share.begin);
      if (receives(call, rank)) addDestination(job, all[rank].output + share.begin);
    }
    jobs.push_back(job);
  } else if (kind.reduces) {
    Job job = jobOf(call, call.bytes);
    for (const Buffers& buffers : all) {
      addSource(job, buffers.input + blockTo(call, buffers.splits, me).at);
    }
    addDestination(job, all[me].output);
    jobs.push_back(job);
  } else if (!kind.blocksOut) {
    // The owner of a vector that all ranks get writes it to all, so it is read once. If each receiver copied it, each
    // would read it.
    if (!sends(call, me)) return {};
    Job job = copyOf(call.bytes);
    addSource(job, all[me].input);
    for (size_t rank = 0; rank < all.size(); ++rank) {
      if (!receives(call, rank)) continue;
      std::byte* const into = all[rank].output + blockFrom(call, all[rank].splits, me).at;
      if (rank != me || into != all[me].input) addDestination(job, into);  // else in place
    }
    jobs.push_back(job);
  } else {
    // Each rank copies its own blocks.
    for (size_t sender = 0; sender < all.size(); ++sender) {
      if (!sends(call, sender)) continue;
      const Block from = blockTo(call, all[sender].splits, me);
      addCopy(jobs, all[sender].input + from.at,
              all[me].output + blockFrom(call, all[me].splits, sender).at, from.bytes);
    }
  }
  dropEmpty(jobs);
  return jobs;
}

int64_t numStagedParts(const Call& call, uint64_t half) {
  const uint64_t piece = pieceBytes(call, half);
  return static_cast<int64_t>((call.bytes + piece - 1) / piece) + 1;
}

std::vector<Job> stagedJobs(const Call& call, int64_t part, uint64_t half, const Buffers& mine,
                            const std::vector<std::byte*>& workspaces) {
  std::vector<Job> jobs;
  if (part > 0) take(jobs, call, part - 1, half, mine, workspaces);
  if (part + 1 < numStagedParts(call, half)) {
    stage(jobs, call, part, half, mine, workspaces[static_cast<size_t>(call.me)]);
  }
  dropEmpty(jobs);
  return jobs;
}

}  // namespace smddp::cuda
