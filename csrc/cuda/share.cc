#include "cuda/share.h"

#include <algorithm>

namespace smddp::cuda {
namespace {

// Shares begin at multiples of it: whole accesses, and no two ranks in one line of the GPU's cache.
constexpr uint64_t kShareBytes = 128;

bool reduces(const Call& call) {
  return call.operation == Operation::AllReduce || call.operation == Operation::Reduce ||
         call.operation == Operation::ReduceScatter;
}

Job copyOf(uint64_t bytes) {
  Job job;
  job.type = DataType::uint8;
  job.count = bytes;
  return job;
}

// A job over `bytes` of the call's elements.
Job jobOf(const Call& call, uint64_t bytes) {
  if (!reduces(call)) return copyOf(bytes);
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
  return call.operation == Operation::ReduceScatter ? half / static_cast<uint64_t>(call.size)
                                                    : half;
}

Range pieceOf(const Call& call, int64_t piece, uint64_t half) {
  const uint64_t bytes = pieceBytes(call, half), begin = static_cast<uint64_t>(piece) * bytes;
  return {std::min(call.bytes, begin), std::min(call.bytes, begin + bytes)};
}

std::byte* halfOf(std::byte* workspace, int64_t piece, uint64_t half) {
  return workspace + static_cast<uint64_t>(piece % 2) * half;
}

void stage(std::vector<Job>& jobs, const Call& call, Range piece, const Buffers& mine,
           std::byte* into) {
  if (call.operation == Operation::ReduceScatter) {
    for (int rank = 0; rank < call.size; ++rank) {
      const auto block = static_cast<uint64_t>(rank);
      addCopy(jobs, mine.input + block * call.bytes + piece.begin, into + block * piece.bytes(),
              piece.bytes());
    }
  } else if (call.operation != Operation::Broadcast || call.me == call.root) {
    addCopy(jobs, mine.input + piece.begin, into, piece.bytes());
  }
}

void take(std::vector<Job>& jobs, const Call& call, Range piece, const Buffers& mine,
          const std::vector<std::byte*>& from) {
  const auto root = static_cast<size_t>(call.root);
  if (call.operation == Operation::AllGather) {
    for (size_t rank = 0; rank < from.size(); ++rank) {
      addCopy(jobs, from[rank], mine.output + rank * call.bytes + piece.begin, piece.bytes());
    }
  } else if (call.operation == Operation::Broadcast) {
    if (call.me != call.root) addCopy(jobs, from[root], mine.output + piece.begin, piece.bytes());
  } else if (call.operation != Operation::Reduce || call.me == call.root) {
    Job job = jobOf(call, piece.bytes());
    const uint64_t mineAt = call.operation == Operation::ReduceScatter
                                ? static_cast<uint64_t>(call.me) * piece.bytes()
                                : 0;
    for (const std::byte* workspace : from) addSource(job, workspace + mineAt);
    addDestination(job, mine.output + piece.begin);
    jobs.push_back(job);
  }
}

void dropEmpty(std::vector<Job>& jobs) {
  std::erase_if(jobs, [](const Job& job) { return job.count == 0; });
}

}  // namespace

std::vector<Job> directJobs(const Call& call, const std::vector<Buffers>& all) {
  const auto me = static_cast<size_t>(call.me), root = static_cast<size_t>(call.root);
  Job job = jobOf(call, call.bytes);
  switch (call.operation) {
    case Operation::AllReduce:
    case Operation::Reduce: {
      const Range share = shareOf(call);
      job = jobOf(call, share.bytes());
      for (size_t rank = 0; rank < all.size(); ++rank) {
        addSource(job, all[rank].input + share.begin);
        if (call.operation == Operation::AllReduce || rank == root) {
          addDestination(job, all[rank].output + share.begin);
        }
      }
      break;
    }
    case Operation::ReduceScatter:
      for (const Buffers& buffers : all) addSource(job, buffers.input + me * call.bytes);
      addDestination(job, all[me].output);
      break;
    case Operation::AllGather:
      addSource(job, all[me].input);
      for (const Buffers& buffers : all) addDestination(job, buffers.output + me * call.bytes);
      break;
    case Operation::Broadcast:
      // One copy reads the root's tensor once; as many as there are ranks would each read it.
      if (me != root) return {};
      addSource(job, all[root].input);
      for (size_t rank = 0; rank < all.size(); ++rank) {
        if (rank != root) addDestination(job, all[rank].output);
      }
      break;
  }
  std::vector<Job> jobs{job};
  dropEmpty(jobs);
  if (!jobs.empty() && job.numDsts == 0) jobs.clear();
  return jobs;
}

int64_t numStagedParts(const Call& call, uint64_t half) {
  const uint64_t piece = pieceBytes(call, half);
  return static_cast<int64_t>((call.bytes + piece - 1) / piece) + 1;
}

std::vector<Job> stagedJobs(const Call& call, int64_t part, uint64_t half, const Buffers& mine,
                            const std::vector<std::byte*>& workspaces) {
  std::vector<Job> jobs;
  if (part > 0) {
    std::vector<std::byte*> from;
    for (std::byte* workspace : workspaces) from.push_back(halfOf(workspace, part - 1, half));
    take(jobs, call, pieceOf(call, part - 1, half), mine, from);
  }
  if (part + 1 < numStagedParts(call, half)) {
    std::byte* const own = workspaces[static_cast<size_t>(call.me)];
    stage(jobs, call, pieceOf(call, part, half), mine, halfOf(own, part, half));
  }
  dropEmpty(jobs);
  return jobs;
}

}  // namespace smddp::cuda
