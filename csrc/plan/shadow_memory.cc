#include "plan/shadow_memory.h"

#include <algorithm>

namespace smddp::plan {

void append(std::vector<Piece>& pieces, const Piece& piece) {
  if (!pieces.empty()) {
    Piece& last = pieces.back();
    const bool isNext =
        piece.value.id == kUndefined || piece.value.position == last.value.position + last.length;
    if (last.value.id == piece.value.id && isNext) {
      last.length += piece.length;
      return;
    }
  }
  pieces.push_back(piece);
}

// Makes `offset` the start of a segment. `offset` must not be beyond the end of the last segment.
ShadowMemory::Segments::iterator ShadowMemory::splitAt(int64_t offset) {
  auto it = segments_.lower_bound(offset);
  if (it != segments_.end() && it->first == offset) return it;
  auto before = std::prev(it);
  if (before->second.end <= offset) return it;
  Segment tail = before->second;
  tail.value.position += offset - before->first;
  before->second.end = offset;
  return segments_.emplace_hint(it, offset, std::move(tail));
}

// Splits segments so that some of them cover exactly [offset, end). Returns the first of these.
ShadowMemory::Segments::iterator ShadowMemory::cover(int64_t offset, int64_t end) {
  const int64_t covered = segments_.empty() ? 0 : segments_.rbegin()->second.end;
  if (covered < end) segments_[covered].end = end;
  splitAt(end);
  return splitAt(offset);
}

std::optional<Conflict> ShadowMemory::read(int64_t offset, int64_t length, const Accessor& by,
                                           std::vector<Piece>& pieces) {
  std::optional<Conflict> conflict;
  const int64_t end = offset + length;
  for (auto it = cover(offset, end); it != segments_.end() && it->first < end; ++it) {
    Segment& segment = it->second;
    const int64_t size = segment.end - it->first;
    if (!conflict && !isOver(segment.write, by.clock, by.messages)) {
      conflict = Conflict{segment.write, true, it->first, size};
    }
    // A step that is ordered after this read is also ordered after the reads before it: forget those.
    std::erase_if(segment.reads,
                  [&](const Access& earlier) { return isOver(earlier, by.clock, by.messages); });
    segment.reads.push_back(by.access);
    append(pieces, {size, segment.value});
  }
  return conflict;
}

std::optional<Conflict> ShadowMemory::write(int64_t offset, int64_t length, const Accessor& by,
                                            const std::vector<Piece>& pieces) {
  std::optional<Conflict> conflict;
  const int64_t end = offset + length;
  const auto first = cover(offset, end);
  auto last = first;
  for (; last != segments_.end() && last->first < end; ++last) {
    const Segment& segment = last->second;
    const auto check = [&](const Access& earlier, bool writes) {
      if (conflict || isOver(earlier, by.clock, by.messages)) return;
      conflict = Conflict{earlier, writes, last->first, segment.end - last->first};
    };
    check(segment.write, true);
    for (const Access& earlier : segment.reads) check(earlier, false);
  }
  segments_.erase(first, last);
  for (const Piece& piece : pieces) {
    segments_.emplace_hint(last, offset,
                           Segment{offset + piece.length, piece.value, by.access, {}});
    offset += piece.length;
  }
  return conflict;
}

}  // namespace smddp::plan
