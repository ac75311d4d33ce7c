// Algorithms write their plans with a Builder. They describe what happens to one chunk, stage by stage. Each stage
// becomes a lane, and lanes run concurrently, so the chunks are pipelined.
//
//   Builder b(topology, limits, "two-phase shared-memory allreduce");
//   b.arrive();
//   b.eachChunk(bytes, limits.chunkBytes, [&](const Chunk& c) {
//     b.stage("reduce");
//     b.waitMates(kCopied, c.index + 1);
//     b.reduce({b.out(mine)}, contributions, final);
//     b.signal(kReduced, c.index + 1);
//   });
//   return b.done();
//
// eachChunk calls the body for chunks 0 and 1 and takes the difference of their numbers as the stride of a repeated
// block. For example, offsets 0 and 65536 become 0 + 65536 * k. It checks the result against the last full chunk and
// throws if the body is not affine in the chunk index. A shorter last chunk becomes a block of its own; it is cut
// at the boundaries of a full chunk.
//
// The builder counts messages: put, receive and release each mean the next message of their channel.
#pragma once

#include <functional>
#include <initializer_list>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "plan/topology.h"

namespace smddp::plan {

// Shares and chunks begin at multiples of this many bytes. It is a cache line, and a multiple of every element size.
inline constexpr int64_t kGranule = 64;

struct Range {
  int64_t offset = 0;
  int64_t length = 0;
};

// Part i of `parts` nearly equal parts of [offset, offset + length). Parts begin at granules and are clipped to the
// first `limit` bytes of the range (for a shorter last chunk: `length` is that of a full chunk, `limit` its own).
// Example: 320 bytes are 5 granules; three parts are [0, 64), [64, 192) and [192, 320). With the limit 100 they
// are [0, 64), [64, 100) and an empty one.
Range share(Range whole, int i, int parts, int64_t limit);

struct Chunk {  // one chunk of the vector, as eachChunk passes it to the body
  int64_t index = 0;
  int64_t offset = 0;  // in the vector
  int64_t length = 0;
  int64_t fullLength = 0;
  // Part i of the chunk, with offsets in the vector. A shorter last chunk is cut where a full chunk would be cut,
  // because its shares go to slots that are laid out for full chunks.
  Range share(int i, int parts) const {
    return plan::share({offset, fullLength}, i, parts, length);
  }
  Range all() const { return {offset, length}; }
};

// The scaling that a copy or reduction does besides the operation: see Step.
struct Scales {
  bool pre = false;
  bool post = false;
};

class Builder {
 public:
  Builder(const Topology& topology, const Limits& limits, std::string name);

  const Topology& topology() const { return topology_; }
  const Limits& limits() const { return limits_; }

  // Memory. `local` is an index into topology().team().
  static Ref in(int64_t offset) { return {Space::Input, 0, false, 0, {}, {offset, 0}}; }
  static Ref out(int64_t offset) { return {Space::Output, 0, false, 0, {}, {offset, 0}}; }
  static Ref residual(int64_t offset) { return {Space::Residual, 0, false, 0, {}, {offset, 0}}; }
  // Makes the plan zero-copy, as mateIn and mateOut do. For a rank that does not touch its mates' buffers, while
  // they use its own.
  void shareBuffers() { plan_.zeroCopy = true; }
  Ref mateIn(int local, int64_t offset);
  Ref mateOut(int local, int64_t offset);
  // Declares a pool. All ranks of a node must declare the same pools in the same order.
  uint8_t pool(std::string name, int64_t slots, int64_t slotBytes);
  static Ref slot(uint8_t pool, int local, int64_t index, int64_t offset) {
    return {Space::Slot, pool, false, local, {index, 0}, {offset, 0}};
  }
  // The wire format of encoded ranges. Set it before the first of them.
  void setWire(Wire wire) { plan_.wire = wire; }
  // Returns a reference to the same memory as an encoded range.
  static Ref encoded(Ref ref) {
    ref.isEncoded = true;
    return ref;
  }
  int64_t encodedLength(int64_t length) const { return plan_.encodedLength(length); }

  // Ends the preamble. Copies written before arrive() run before the arrival signal. Each plan calls arrive()
  // exactly once, before the first stage.
  void arrive();

  // The following steps go to this stage's lane, until the next call. The steps of a stage run in the order in
  // which they are written.
  void stage(const std::string& name);

  // Copies and reductions of length zero are dropped. Signals and messages are kept. `residual`: Step::hasResidual.
  void copy(std::vector<Ref> destinations, Ref source, int64_t length, Scales scales = {},
            std::optional<Ref> residual = {});
  void reduce(std::vector<Ref> destinations, std::vector<Ref> sources, int64_t length,
              Scales scales = {}, std::optional<Ref> residual = {});
  void signal(int counter, int64_t value);
  void waitMates(int counter, int64_t value);
  void waitRank(int local, int counter, int64_t value);
  // `length`: of the elements before encoding, if the source is encoded.
  void put(Rank to, int stream, Ref source, int64_t length);
  // Waits for the next message. Returns a reference to its bytes.
  Ref receive(Rank from, int stream, int64_t length);
  // Receives a message that the caller copies to this destination. If that is an output, the message may arrive there
  // (Op::Post). A slot is free only later, when the lane has waited for that.
  Ref receiveAt(Ref destination, Rank from, int stream, int64_t length);
  // Receives a message that was put from an encoded range.
  Ref receiveEncoded(Rank from, int stream, int64_t length);
  void release(Rank from, int stream);
  // Waits until the sources of the first `count` puts of this execution on the channel may be overwritten.
  void flush(Rank to, int stream, int64_t count);
  // Waits so for all puts written so far.
  void flush(Rank to, int stream);

  // Cuts [0, bytes) into nearly equal chunks of at most chunkBytes. Calls the body for some of them only; it must
  // write the same steps each time. An empty vector is one empty chunk.
  void eachChunk(int64_t bytes, int64_t chunkBytes, const std::function<void(const Chunk&)>& body);

  // Returns the plan. Throws Internal if one of the rules above was broken.
  Plan done();

 private:
  struct Written {
    Step step;
    std::vector<Ref> refs;
  };
  struct Stage {
    std::string name;
    std::vector<Block> blocks;
  };
  using Script = std::map<size_t, std::vector<Written>>;  // stage -> steps
  struct ChannelCount {
    int64_t puts = 0, receives = 0, releases = 0;
  };
  using Channels = std::map<std::pair<Rank, int>, ChannelCount>;

  void write(Step step, std::vector<Ref> refs);
  void move(Op op, std::vector<Ref> destinations, std::span<const Ref> sources, int64_t length,
            Scales scales, std::optional<Ref> residual);
  Step channelStep(Op op, Rank rank, int stream, int64_t value, int64_t length) const;
  Script record(const std::function<void(const Chunk&)>& body, const Chunk& chunk);
  static Channels advance(const Channels& start, const Channels& end, int64_t times);
  void emit(Script&& script, int64_t trips);
  void flushPending();

  Topology topology_;
  Limits limits_;
  Plan plan_;
  std::vector<Stage> stages_;
  std::vector<Written> preamble_;
  Script pending_;  // steps written outside eachChunk, not yet emitted
  Script* target_ = &pending_;
  int current_ = -1;
  bool arrived_ = false;
  bool inChunk_ = false;
  Channels channels_;
};

}  // namespace smddp::plan
