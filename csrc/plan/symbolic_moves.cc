// SymbolicRun: the steps that move bytes, and the check of the outputs at the end.
#include <algorithm>

#include <fmt/format.h>

#include "plan/symbolic_run.h"

namespace smddp::plan {

SymbolicRun::Place SymbolicRun::bufferOf(Rank rank, size_t execution, bool isInput) {
  const bool isSeparate = isInput && !executions_[execution].inPlace[rank];
  return {isSeparate ? &ranks_[rank].input : &ranks_[rank].output, 0};
}

// Finds the memory of a reference in the current trip. Fails if the bytes lie outside of it.
SymbolicRun::Place SymbolicRun::resolve(const Thread& t, const Ref& ref, int64_t length) {
  const size_t e = ranks_[t.rank].execution;
  const int64_t offset = ref.offset.at(t.trip);
  const int64_t index = ref.index.at(t.trip);
  const auto& team = topology_.node(topology_.nodeOf(t.rank));
  const auto requireInside = [&](int64_t size) {
    if (offset >= 0 && index >= 0 && offset + length <= size) return;
    fail(Verdict::Kind::Malformed, fmt::format("{}: outside the {} bytes there", nameOf(t), size));
  };
  const bool isMate = ref.space == Space::MateInput || ref.space == Space::MateOutput;
  const Rank owner = isMate || ref.space == Space::Slot ? team[ref.owner] : t.rank;
  Place place;
  if (ref.space == Space::Slot) {
    const Pool& pool = planOf(t).pools[ref.poolOrStream];
    requireInside(pool.slotBytes);
    place = {&ranks_[owner].halves[e % 2], pool.offset + index % pool.slots * pool.slotBytes};
  } else if (ref.space == Space::Message) {
    const auto found = channels_.find({ref.owner, t.rank, ref.poolOrStream});
    if (found == channels_.end() || index >= found->second.base[e + 1] - found->second.base[e]) {
      fail(Verdict::Kind::Malformed, nameOf(t) + ": no such message is declared");
    }
    requireInside(limits_.messageBytes);
    Channel& channel = found->second;
    const auto posted = channel.posted.find(channel.base[e] + index);
    if (posted != channel.posted.end() && posted->second.hasArrived) {
      requireInside(posted->second.length);
      place = posted->second.place;
    } else {
      place = {&channel.window, (channel.base[e] + index) % limits_.window * limits_.messageBytes};
    }
  } else if (ref.space == Space::Residual) {
    requireInside(executions_[e].inputBytes[owner]);
    place = {&ranks_[owner].residual, 0};
  } else {
    const bool isInput = ref.space == Space::Input || ref.space == Space::MateInput;
    requireInside(isInput ? executions_[e].inputBytes[owner] : executions_[e].outputBytes[owner]);
    place = bufferOf(owner, e, isInput);
  }
  place.offset += offset;
  return place;
}

void SymbolicRun::read(const Thread& t, Place place, int64_t length, const Access& access,
                       std::vector<Piece>& pieces) {
  const Accessor by{access, t.clock, messages_};
  if (const auto conflict = place.memory->read(place.offset, length, by, pieces)) {
    failRace(t, place, *conflict, false);
  }
  for (const Piece& piece : pieces) {
    const bool isCurrent =
        expressions_.execution(piece.value.id) == static_cast<int>(ranks_[t.rank].execution);
    if (piece.value.id != kUndefined && isCurrent) continue;
    recordWrongData(fmt::format("{}: reads {}, where {}", nameOf(t), nameOf(place.memory),
                                piece.value.id == kUndefined
                                    ? "nothing was written before"
                                    : "only an earlier execution has written"));
  }
}

void SymbolicRun::write(const Thread& t, Place place, int64_t length, const Access& access,
                        const std::vector<Piece>& pieces) {
  const Accessor by{access, t.clock, messages_};
  if (const auto conflict = place.memory->write(place.offset, length, by, pieces)) {
    failRace(t, place, *conflict, true);
  }
}

// Applies the pre-scaling of a copy or reduction to one operand, and checks that scaling is done where it must be.
Term SymbolicRun::operand(const Thread& t, const Step& step, Term value) {
  if (value.id == kUndefined) return value;
  if (expressions_.isFinished(value.id) && (step.op == Op::Reduce || step.postScale)) {
    recordWrongData(nameOf(t) + ": combines or scales a value that is final already");
  }
  if (step.preScale) {
    if (expressions_.isRaw(value.id)) return {expressions_.scaled(value.id), value.position};
    recordWrongData(nameOf(t) + ": pre-scales what is not an input any more");
  } else if (step.op == Op::Reduce && expressions_.isRaw(value.id)) {
    recordWrongData(fmt::format("{}: reduces the input of rank {} without pre-scaling it",
                                nameOf(t), expressions_.print(value.id)));
  }
  return value;
}

// A destination may be the same bytes as a source, but must not overlap one partly. Destinations must not overlap.
void SymbolicRun::requireApart(const Thread& t, const Step& step) {
  std::vector<Place> places;
  std::vector<int64_t> lengths;
  for (int i = 0; i < step.numDestinations + step.numSources; ++i) {
    const Ref& ref = planOf(t).refs[step.firstRef + i];
    lengths.push_back(planOf(t).bytesOf(step, ref));
    places.push_back(resolve(t, ref, lengths.back()));
  }
  for (int d = 0; d < step.numDestinations; ++d) {
    for (size_t other = d + 1; other < places.size(); ++other) {
      const int64_t distance = places[other].offset - places[d].offset;
      const bool isSource = other >= step.numDestinations;
      const bool areApart = distance >= lengths[d] || -distance >= lengths[other];
      if (places[d].memory != places[other].memory || areApart) continue;
      const bool isPlain = !planOf(t).destination(step, d).isEncoded;
      if (isSource && isPlain && distance == 0 && lengths[d] == lengths[other]) continue;
      fail(Verdict::Kind::Malformed, nameOf(t) + ": a destination overlaps another operand");
    }
  }
}

// Appends the elements that a source of a copy or reduction holds.
void SymbolicRun::readElements(const Thread& t, const Step& step, const Ref& ref,
                               std::vector<Piece>& pieces) {
  const Access access{t.clock.now(), Access::Kind::Step, 0};
  const int64_t bytes = planOf(t).bytesOf(step, ref);
  if (!ref.isEncoded) return read(t, resolve(t, ref, bytes), bytes, access, pieces);
  std::vector<Piece> encoded;
  read(t, resolve(t, ref, bytes), bytes, access, encoded);
  pieces = expressions_.decoded(encoded.front().value.id);
  int64_t length = 0;
  for (const Piece& piece : pieces) length += piece.length;
  if (encoded.size() == 1 && encoded.front().value.position == 0 && length == step.length) return;
  recordWrongData(nameOf(t) + ": decodes what was not encoded as a whole");
  pieces = {{step.length, {}}};
}

// Writes the same elements to all destinations of a copy or reduction.
void SymbolicRun::writeElements(const Thread& t, const Step& step, std::vector<Piece> pieces) {
  const Plan& plan = planOf(t);
  const Access access{t.clock.now(), Access::Kind::Step, 0};
  std::vector<Piece> encoded;
  for (int i = 0; i < step.numDestinations && encoded.empty(); ++i) {
    if (!plan.destination(step, i).isEncoded) continue;
    const ExpressionId id = expressions_.encoded(pieces);
    encoded = {{plan.encodedLength(step.length), {id, 0}}};
    if (id != kUndefined) pieces = expressions_.decoded(id);
  }
  for (int i = 0; i < step.numDestinations; ++i) {
    const Ref& ref = plan.destination(step, i);
    const int64_t bytes = plan.bytesOf(step, ref);
    write(t, resolve(t, ref, bytes), bytes, access, ref.isEncoded ? encoded : pieces);
  }
  if (step.hasResidual) useResidual(t, step, pieces);
}

// A residual belongs to the same elements of the input. Its numbers are not followed.
void SymbolicRun::useResidual(const Thread& t, const Step& step, const std::vector<Piece>& pieces) {
  const Ref& residual = planOf(t).residual(step);
  int64_t offset = residual.offset.at(t.trip);
  for (const Piece& piece : pieces) {
    const auto isOther = [&](const Leaf& leaf) {
      return leaf.offset + piece.value.position != offset;
    };
    if (std::ranges::any_of(expressions_.leaves(piece.value.id), isOther))
      recordWrongData(nameOf(t) + ": the residual of other elements");
    offset += piece.length;
  }
  const Access access{t.clock.now(), Access::Kind::Step, 0};
  write(t, resolve(t, residual, step.length), step.length, access, {{step.length, {}}});
}

void SymbolicRun::copy(Thread& t, const Step& step) {
  requireApart(t, step);
  std::vector<Piece> pieces;
  readElements(t, step, planOf(t).source(step, 0), pieces);
  for (Piece& piece : pieces) {
    piece.value = operand(t, step, piece.value);
    if (step.postScale) piece.value.id = expressions_.finished(piece.value.id);
  }
  writeElements(t, step, std::move(pieces));
}

void SymbolicRun::reduce(Thread& t, const Step& step) {
  requireApart(t, step);
  std::vector<std::vector<Piece>> sources(step.numSources);
  for (int i = 0; i < step.numSources; ++i) {
    readElements(t, step, planOf(t).source(step, i), sources[i]);
  }
  // Walk all sources together, from one boundary of any of them to the next.
  std::vector<Piece> result;
  std::vector<size_t> at(sources.size(), 0);
  std::vector<Term> operands(sources.size());
  for (int64_t done = 0; done < step.length;) {
    int64_t length = step.length - done;
    for (size_t i = 0; i < sources.size(); ++i) {
      const Piece& piece = sources[i][at[i]];
      length = std::min(length, piece.length);
      operands[i] = operand(t, step, piece.value);
    }
    Term value = expressions_.reduce(operands);
    if (step.postScale) value.id = expressions_.finished(value.id);
    append(result, {length, value});
    for (size_t i = 0; i < sources.size(); ++i) {
      Piece& piece = sources[i][at[i]];
      piece.length -= length;
      piece.value.position += length;
      if (piece.length == 0) ++at[i];
    }
    done += length;
  }
  writeElements(t, step, std::move(result));
}

// Moves the bytes of a put. Source and target count as in use until the put is over (isOver).
void SymbolicRun::transmit(Thread& t, const Step& step, Channel& channel, uint32_t message) {
  if (step.length == 0) return;
  const auto number = static_cast<int64_t>(channel.messages.size()) - 1;
  std::vector<Piece> pieces;
  read(t, resolve(t, planOf(t).source(step, 0), step.length), step.length,
       {t.clock.now(), Access::Kind::PutSource, message}, pieces);
  if (usesPosts_) messages_[message].contents = pieces;
  const auto posted = channel.posted.find(number);
  if (posted != channel.posted.end()) return arrive(posted->second, message);
  write(t, {&channel.window, number % limits_.window * limits_.messageBytes}, step.length,
        {t.clock.now(), Access::Kind::PutTarget, message}, pieces);
}

// Writes the contents of a message where it is posted. That happens after both the put and the post.
void SymbolicRun::arrive(Posted& posted, uint32_t number) {
  const Message& message = messages_[number];
  if (posted.length != message.length) return;
  Thread both;
  both.clock = posted.clock;
  both.clock.join(message.sent);
  write(both, posted.place, message.length, {message.putAt, Access::Kind::PutTarget, number},
        message.contents);
  posted.hasArrived = true;
}

// The caller fills its input before the call, and may overwrite both buffers after it.
void SymbolicRun::callerWrites(Rank rank, bool isBefore) {
  const size_t e = ranks_[rank].execution;
  const Thread& t = threads_[ranks_[rank].firstThread];
  const Access access{t.clock.now(), Access::Kind::Step, 0};
  const auto fill = [&](bool isInput, int64_t length, ExpressionId id) {
    if (length == 0) return;
    write(t, bufferOf(rank, e, isInput), length, access, {{length, {id, 0}}});
  };
  const Execution& execution = executions_[e];
  fill(false, execution.outputBytes[rank], kUndefined);
  const ExpressionId own = expressions_.input(rank, static_cast<int>(e));
  fill(true, execution.inputBytes[rank], isBefore ? own : kUndefined);
}

void SymbolicRun::requireOutputs(Rank rank) {
  for (const Expectation& expected : executionOf(rank).expectations) {
    if (expected.rank == rank && expected.length > 0) requireOutput(rank, expected);
  }
}

void SymbolicRun::requireOutput(Rank rank, const Expectation& expected) {
  const size_t e = ranks_[rank].execution;
  const Thread& t = threads_[ranks_[rank].firstThread];
  std::vector<Piece> pieces;
  const Accessor by{{t.clock.now(), Access::Kind::Step, 0}, t.clock, messages_};
  const Place output = bufferOf(rank, e, false);
  const auto conflict = output.memory->read(expected.offset, expected.length, by, pieces);
  if (conflict) failRace(t, output, *conflict, false);
  int64_t offset = 0;
  for (const Piece& piece : pieces) {
    requireSum(rank, expected, offset, piece);
    offset += piece.length;
  }
  if (expected.isReduction) requireSameOrder(expected, pieces);
}

// Checks that the piece at `offset` of the expected range holds each contribution once and nothing else.
void SymbolicRun::requireSum(Rank rank, const Expectation& expected, int64_t offset,
                             const Piece& piece) {
  const ExpressionId id = piece.value.id;
  // Take positions relative to the start of the expected range, so that one check serves all its equal pieces.
  const int64_t shift = piece.value.position - offset;
  const auto [seen, isNew] = sumsSeen_.try_emplace({&expected, id, shift});
  std::string& complaint = seen->second;
  if (!isNew) return;
  const auto e = static_cast<int>(ranks_[rank].execution);
  const std::vector<Leaf>& leaves = expressions_.leaves(id);
  if (id == kUndefined) {
    complaint = "nothing";
  } else if (expressions_.execution(id) != e) {
    complaint = "something of another execution";
  } else if (expressions_.isFinished(id) != expected.isReduction) {
    complaint = expected.isReduction ? "a sum without its final scaling" : "a scaled value";
  } else {
    bool isRight = leaves.size() == expected.contributions.size();
    for (size_t i = 0; isRight && i < leaves.size(); ++i) {
      const Contribution& wanted = expected.contributions[i];
      isRight = leaves[i].rank == wanted.rank && leaves[i].offset + shift == wanted.offset &&
                leaves[i].scaled == expected.isReduction;
    }
    if (!isRight) complaint = "the wrong contributions";
  }
  if (complaint.empty()) return;
  recordWrongData(
      fmt::format("rank {}, execution {}: output [{}, +{}) holds {}: {} from byte {} on", rank, e,
                  expected.offset + offset, piece.length, complaint, expressions_.print(id),
                  piece.value.position));
}

// The rank that ends first determines the order in which the same inputs are reduced. All others must have the same.
void SymbolicRun::requireSameOrder(const Expectation& expected, const std::vector<Piece>& pieces) {
  const Execution& execution = executionOf(expected.rank);
  const size_t e = ranks_[expected.rank].execution;
  auto& order = orders_[e][{expected.contributions.front().offset, expected.length}];
  if (order.empty()) order = pieces;
  if (execution.hasOneOrder && oneOrder_[e] == kUndefined) oneOrder_[e] = pieces.front().value.id;
  size_t other = 0;
  int64_t offset = 0, otherEnd = order.front().length;
  for (const Piece& piece : pieces) {
    if (execution.hasOneOrder && piece.value.id != oneOrder_[e]) {
      recordWrongData(
          fmt::format("rank {}, execution {}: output from {} on is {}, elsewhere it is {}",
                      expected.rank, e, expected.offset + offset,
                      expressions_.print(piece.value.id), expressions_.print(oneOrder_[e])));
    }
    const int64_t end = offset + piece.length;
    while (offset < end) {
      if (piece.value.id != order[other].value.id) {
        recordWrongData(fmt::format(
            "rank {}, execution {}: output from {} on is {}, another rank has {}", expected.rank, e,
            expected.offset + offset, expressions_.print(piece.value.id),
            expressions_.print(order[other].value.id)));
        return;
      }
      offset = std::min(end, otherEnd);
      if (offset == otherEnd && ++other < order.size()) otherEnd += order[other].length;
    }
  }
}

}  // namespace smddp::plan
