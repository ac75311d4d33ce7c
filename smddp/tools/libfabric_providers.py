"""Asks libfabric for its providers on this host, as `fi_info` does, which need not be installed."""

from __future__ import annotations

import ctypes

__all__ = ["providers"]

# The version of the interface that the structs below belong to. Later ones have more fields behind.
_VERSION = 1 << 16 | 17


class _FabricAttributes(ctypes.Structure):
    """The beginning of struct fi_fabric_attr (rdma/fabric.h)."""

    _fields_ = (
        ("fabric", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("provider", ctypes.c_char_p),
    )


class _Info(ctypes.Structure):
    """The beginning of struct fi_info."""


_Info._fields_ = (
    ("next", ctypes.POINTER(_Info)),
    ("caps", ctypes.c_uint64),
    ("mode", ctypes.c_uint64),
    ("addr_format", ctypes.c_uint32),
    ("src_addrlen", ctypes.c_size_t),
    ("dest_addrlen", ctypes.c_size_t),
    ("src_addr", ctypes.c_void_p),
    ("dest_addr", ctypes.c_void_p),
    ("handle", ctypes.c_void_p),
    ("tx_attr", ctypes.c_void_p),
    ("rx_attr", ctypes.c_void_p),
    ("ep_attr", ctypes.c_void_p),
    ("domain_attr", ctypes.c_void_p),
    ("fabric_attr", ctypes.POINTER(_FabricAttributes)),
)


def providers() -> list[str]:
    """Returns the providers that can be used here, in libfabric's order of preference.

    Empty if there is none, or no libfabric.
    """
    try:
        library = ctypes.CDLL("libfabric.so.1")
    except OSError:
        return []
    first = ctypes.POINTER(_Info)()
    # Neither a node nor a service nor flags nor hints: everything.
    if library.fi_getinfo(_VERSION, None, None, ctypes.c_uint64(0), None, ctypes.byref(first)) != 0:
        return []
    found: dict[str, None] = {}
    entry = first
    while entry:
        attributes = entry.contents.fabric_attr
        if attributes and attributes.contents.provider:
            found[attributes.contents.provider.decode()] = None
        entry = entry.contents.next
    library.fi_freeinfo(first)
    return list(found)
