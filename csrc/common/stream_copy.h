// memcpy whose result is not kept in this core's caches.
//
// For memory that another core reads next, and that this core does not: where the two cores have no cache in common, a
// line that one has written reaches the other through the fabric between their caches, one miss at a time; what was
// streamed is read from memory, as fast as any other (docs/performance.md has both).
#pragma once

#include <cstddef>

namespace smddp {

// As memcpy. Complete when it returns: a release store that follows publishes the bytes. Any alignment; worth it from
// some KiB on.
void streamCopy(void* destination, const void* source, size_t bytes);

}  // namespace smddp
