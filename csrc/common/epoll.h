// Sockets in an epoll set.
#pragma once

#include <sys/epoll.h>

#include "common/file_descriptor.h"

namespace smddp {

// epoll_ctl(): `operation` is EPOLL_CTL_ADD, _MOD or _DEL. Throws Resource.
void setEpoll(const FileDescriptor& epoll, int operation, int descriptor, uint32_t events,
              epoll_data_t data);

// Ends a connection whose socket is in the epoll set, or was. A forked child may have a copy of the socket; then
// close() alone ends neither the connection nor its events.
void endConnection(const FileDescriptor& epoll, int socket) noexcept;

}  // namespace smddp
