"""Passes packets on between network interfaces, each after a delay: a long link, made by hand.

tools/hosts.py starts it where the kernel has no netem. It reads Ethernet frames from each interface
that it is given, and some time later writes them to the one behind which their receiver is.
"""

from __future__ import annotations

import collections
import os
import selectors
import socket
import sys
import time

_SOL_PACKET, _PACKET_VNET_HDR = 263, 15
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_ALL_PROTOCOLS = 3
_OUTGOING = 4  # what this process has written, as its own socket sees it
_HEAD = 10  # struct virtio_net_hdr, with which frames of 64 KiB pass as they are
_LARGEST = _HEAD + 14 + (1 << 16)
_BUFFER = 64 << 20


def _open(interface: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
    port.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _BUFFER)
    port.bind((interface, 0))
    port.setblocking(False)
    return port


def relay(interfaces: list[str], seconds: float) -> None:
    """Passes packets on, until standard input ends.

    Args:
        interfaces: among which packets pass.
        seconds: how long each packet stays here.
    """
    ports = [_open(each) for each in interfaces]
    behind: dict[bytes, socket.socket] = {}
    waiting: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        for port in ports:
            selector.register(port, selectors.EVENT_READ)
        print("ready", flush=True)
        while True:
            wait = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            for key, _ in selector.select(wait):
                if not isinstance(key.fileobj, socket.socket):
                    if not os.read(sys.stdin.fileno(), 64):
                        return
                    continue
                _take(key.fileobj, behind, ports, waiting, time.monotonic() + seconds)
            while waiting and waiting[0][0] <= time.monotonic():
                _, port, frame = waiting.popleft()
                try:
                    port.send(frame)
                except OSError:  # its queue is full, or the interface is down: the packet is lost
                    continue


def _take(
    port: socket.socket,
    behind: dict[bytes, socket.socket],
    ports: list[socket.socket],
    waiting: collections.deque[tuple[float, socket.socket, bytes]],
    due: float,
) -> None:
    """Reads what has arrived, and says when and where it leaves."""
    while True:
        try:
            frame, source = port.recvfrom(_LARGEST)
        except OSError:
            return
        if source[2] == _OUTGOING:
            continue
        target, sender = frame[_HEAD : _HEAD + 6], frame[_HEAD + 6 : _HEAD + 12]
        behind[sender] = port
        known = behind.get(target)
        others = [known] if known is not None else [each for each in ports if each is not port]
        waiting.extend((due, each, frame) for each in others)


if __name__ == "__main__":
    relay(sys.argv[2:], float(sys.argv[1]))
