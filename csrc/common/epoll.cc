#include "common/epoll.h"

#include <sys/socket.h>

#include "common/error.h"

namespace smddp {

void setEpoll(const FileDescriptor& epoll, int operation, int descriptor, uint32_t events,
              epoll_data_t data) {
  epoll_event event{};
  event.events = events;
  event.data = data;
  if (::epoll_ctl(epoll.get(), operation, descriptor, &event) != 0) {
    raiseErrno(ErrorKind::Resource, "cannot watch a socket");
  }
}

void endConnection(const FileDescriptor& epoll, int socket) noexcept {
  (void)::epoll_ctl(epoll.get(), EPOLL_CTL_DEL, socket, nullptr);
  (void)::shutdown(socket, SHUT_RDWR);
}

}  // namespace smddp
