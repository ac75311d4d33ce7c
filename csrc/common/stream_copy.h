// A memcpy with streaming stores, which do not leave the result in this core's caches.
//
// For memory that another core reads next. If the two cores have no common cache, ordinary stores leave the lines in
// the writer's cache, and the reader fetches them from there one miss at a time. After streaming stores it reads them
// from memory, at full bandwidth (docs/performance.md has both figures).
#pragma once

#include <cstddef>

namespace smddp {

// As memcpy, with any alignment. It is complete when it returns: a following release store publishes the bytes. It is
// worth its cost from some KiB on.
void streamCopy(void* destination, const void* source, size_t bytes);

}  // namespace smddp
